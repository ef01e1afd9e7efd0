"""An example of how to extend bide: a store in a dictionary, a sink that writes lines, and a command."""
