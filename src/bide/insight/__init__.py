"""The read model for consoles and operators, and changes to many tasks at once."""
