"""The code that the PostgreSQL and MySQL stores share; each of the two adds its dialect."""
