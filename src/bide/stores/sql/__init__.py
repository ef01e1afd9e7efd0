"""The code that the PostgreSQL and MySQL stores share. SQLite and memory use its filters and its form of rows too."""
