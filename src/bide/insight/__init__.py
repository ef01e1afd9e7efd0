"""The read model of a console and an operator, and changes to many tasks at once."""
