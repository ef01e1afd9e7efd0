"""The engine: the verbs of callers, and the delivery of tasks that are due. It knows the ports only."""
