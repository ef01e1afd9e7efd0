"""The command line. Each command is a module of its own, loaded when it is asked for: see `main`."""

from bide.cli.main import main

__all__ = ["main"]
