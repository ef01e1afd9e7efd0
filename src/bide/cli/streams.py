"""The standard streams of a command: none is missing, and neither a letter nor a reader that is gone fails it."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO


class Output(io.FileIO):
    """Standard output or error. What cannot be written is dropped: who changes something goes on to the end."""

    ends = False
    """True if that is an error all the same: to write is all that the command does."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self.ends:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self.fileno() == 1 and error.errno != errno.EPIPE:
                print(f"bide: the output cannot be written, and is left out: {error}", file=sys.stderr)
            return super().write(data)


def take_streams() -> Output:
    """Replace this process's streams; the standard output."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:  # else a socket or a database would be taken for one
        os.set_inheritable(free, True)
    os.close(free)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stderr, _ = _stream(2, sys.stderr)
    sys.stdout, output = _stream(1, sys.stdout)
    return output


def _stream(number: int, before: TextIO | None) -> tuple[TextIO, Output]:
    raw = Output(number, "wb", closefd=False)
    text = io.TextIOWrapper(
        io.BufferedWriter(raw), before.encoding if before else None, "backslashreplace",
        line_buffering=number == 2 or raw.isatty(),
    )  # fmt: skip
    return text, raw
