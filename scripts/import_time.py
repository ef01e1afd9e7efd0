"""How long `import bide` takes: the least of several fresh processes, less what starting Python itself takes."""

from __future__ import annotations

import subprocess
import sys
import time

ROUNDS = 15


def best(statement: str) -> float:
    """Milliseconds that a fresh interpreter takes to run `statement`, at its quickest."""
    least = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", statement], check=True)
        least = min(least, time.perf_counter() - started)
    return least * 1000


def main() -> None:
    bare, loaded = best("pass"), best("import bide")
    print(f"import bide: {loaded - bare:.0f} ms (python alone: {bare:.0f} ms, best of {ROUNDS} fresh processes)")


if __name__ == "__main__":
    main()
