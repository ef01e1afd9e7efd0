"""How tasks move: client, batcher, worker, keeper, settler, sweeper. Knows the ports only."""
