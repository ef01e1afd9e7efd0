"""bide as an HTTP service for any language. It uses the engine's client, not a store."""
