"""What the stores in PostgreSQL and MySQL share; each of the two is a dialect on it."""
