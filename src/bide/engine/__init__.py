"""How tasks move: the verbs of a client, and in `delivery` the workers. Knows the ports only."""
