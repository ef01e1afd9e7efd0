"""bide as a service: the timeline over HTTP, for any language. Talks to the engine's client, and to nothing below it."""
