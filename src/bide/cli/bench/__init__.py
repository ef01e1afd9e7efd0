"""`bide bench`: measures this machine, checks its own results, and cleans up after itself."""

from bide.cli.bench.command import bench

__all__ = ["bench"]
