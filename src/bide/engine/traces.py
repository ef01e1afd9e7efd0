"""The trace of an exception, as it is kept behind the text of a task's error."""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from itertools import dropwhile
from linecache import getline, lazycache
from traceback import walk_tb
from types import FrameType

from bide.core.texts import TRACE, error_text, storable

LONGEST_TRACE = 4_096
"""Characters of a trace that are kept: the last ones."""
_MOST_FRAMES, _MOST_CAUSES = 20, 4
_ON_THE_WAY = ("bide.engine.", "bide.sinks.handlers", "bide.sinks.traced")
"""Modules that call handlers: a trace begins behind them."""


def trace_of(error: BaseException) -> str:
    """Where `error` arose, after what led to it, to be kept behind its text; empty if it was raised nowhere.

    The lines of the source, and no values of variables: at most 4 causes, of a group the first error, with 20 frames
    each. O(depth): 4 us for one frame, 20 us for ten with a cause. A file is read when it is first met, on the loop, as
    it is for the log.
    """
    links: list[str] = []
    at: BaseException | None = error
    try:
        while at is not None and len(links) <= _MOST_CAUSES:
            frames = deque(dropwhile(_on_the_way, walk_tb(at.__traceback__)), maxlen=_MOST_FRAMES)
            said = f"{error_text(at)[:400]}\n\nwhich led to:\n\n" if links else ""
            links.append("".join([_place(frame, line) for frame, line in frames]) + said)
            cause = at.__cause__ if at.__suppress_context__ else at.__cause__ or at.__context__
            at = at.exceptions[0] if isinstance(at, BaseExceptionGroup) else cause
    except Exception:  # noqa: BLE001 - an error with a will of its own, or a loader: the text of it must do
        return ""
    text = storable("".join(reversed(links)))
    if len(text) > LONGEST_TRACE:
        text = "  ...\n" + text[-LONGEST_TRACE:].partition("\n")[2]
    return f"{TRACE}Traceback (most recent call last):\n{text}" if text else ""


def _place(frame: FrameType, line: int) -> str:
    code = frame.f_code
    lazycache(code.co_filename, frame.f_globals)  # what stands in an archive is read by its loader
    return _written(code.co_filename, line, code.co_name)


@lru_cache(maxsize=1_024)
def _written(file: str, line: int, name: str) -> str:
    """As it was when it was first met, which is nearer to the code that runs than a file that was changed since."""
    source = getline(file, line).strip()[:400]
    return f'  File "{file}", line {line}, in {name}\n' + (f"    {source}\n" if source else "")


def _on_the_way(place: tuple[FrameType, int]) -> bool:
    return str(place[0].f_globals.get("__name__")).startswith(_ON_THE_WAY)
