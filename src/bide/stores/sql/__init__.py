"""The body of the stores in PostgreSQL and MySQL; each of the two is a dialect on it."""
