"""The command line. Each command is a module of its own, loaded when it is asked for: see `group`."""

from bide.cli.change import main

__all__ = ["main"]
