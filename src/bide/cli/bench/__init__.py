"""`bide bench`: measures this machine, checks its own result, and cleans up after itself."""

from bide.cli.bench.command import bench

__all__ = ["bench"]
