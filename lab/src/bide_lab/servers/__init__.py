"""The common part of strategies on one kind of server: a connection, and names of their own on it."""
