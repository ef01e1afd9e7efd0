"""The verbs of a client and, in `delivery`, the workers. Depends on the ports only."""
