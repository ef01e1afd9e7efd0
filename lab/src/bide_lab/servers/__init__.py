"""What strategies of one kind of server share: a connection, and names of their own on it."""
