"""Checks the journals of the processes that worked on one store.

    python -m bide.testing.history FILE...

The files are merged by time. Each broken promise is printed with the events that show it, then the numbers as one JSON
object. The exit code is 1 if a promise was broken, and 2 if the check could not read a file or decide some task.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bide.testing.history.check import check
from bide.testing.history.recording import read_all


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bide.testing.history", description="Check histories.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a journal; one of each process")
    parser.add_argument("--late-over", type=int, metavar="MS", help="count first deliveries later than so many ms")
    given = parser.parse_args(arguments)
    try:
        report = check(read_all(given.files), late_over=given.late_over)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for violation in report.violations:
        sys.stdout.write(f"{violation}\n\n")
    for topic, key in report.undecided:
        sys.stdout.write(f"undecided: {topic}/{key}\n")
    sys.stdout.write(json.dumps(report.summary()) + "\n")
    return 1 if report.violations else 2 if report.undecided else 0


if __name__ == "__main__":
    sys.exit(main())
