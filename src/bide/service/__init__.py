"""bide as a service: the timeline over HTTP, for any language. It talks to the engine's client, not to a store."""
