"""The command line. Each command is a module of its own, imported when it is named: see `main`."""

from bide.cli.main import main

__all__ = ["main"]
