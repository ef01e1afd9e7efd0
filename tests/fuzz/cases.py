"""What the fuzzing tests share: how many cases, how long one may take, input that is nearly valid, clear refusals.

Each test feeds something that reads with valid input, input that is nearly valid (a few characters or bytes of a valid
one changed) and noise. What is accepted has to be right, by a second, simpler reading, or since it can be read back;
what is refused has to be refused by an error of bide's that says what would be accepted, or where the damage is.
Another exception, a case that does not end, or a task that is silently gone is a bug.

FUZZ=10 plays ten times as many cases, other ones each time; `make fuzz` does that.
"""

from __future__ import annotations

import os
import signal
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from bide.core.errors import BadInput

TIMES = float(os.environ.get("FUZZ", "1"))
Test = Callable[..., None]
T = TypeVar("T")
U = TypeVar("U")

ODD_TEXT = (
    "\0", "\n", "\r", "\t", "\x1b", "\x7f", "\x85", "\u00a0", "\u00b2", "\u0661", "\u200b", "\u2028", "\u2100",
    "\u202e", "\ud800", "\udfff", "\ufeff", "\uff0f", "\U0001f600", "e\u0301", "%", "%00", "%2F", "%ff", "%zz", "/",
    "\\", "//", "..", ":", ";", "?", "#", "@", "[", "]", "{", "}", "(", ")", "'", '"', "`", "--", "/*", "+", "-", ".",
    ",", "&", "=", " ", "0", "-0", "1e9", "nan", "inf", "null", "true", "9" * 30, "x" * 300,
)  # fmt: skip
"""Characters and words that parsers trip over."""
ODD_NUMBERS = (
    0, 127, 255, 65_535, 2**31, 2**32, 2**48, 2**53, 2**63, 2**64, -(2**31), -(2**63), 10**30, 253_402_300_799_999,
)  # fmt: skip
"""Edges of what fits somewhere."""
ODD_VALUES = st.sampled_from([None, 0, 15, 1.5, True, b"15m", [], {}, float("nan"), object(), ("15m",)])

NUMBERS = (
    st.integers(-5, 1_000)
    | st.builds(int.__add__, st.sampled_from(ODD_NUMBERS), st.integers(-1, 1))
    | st.integers(-(2**80), 2**80)
)
NOISE = st.text(max_size=40) | st.lists(st.sampled_from(ODD_TEXT), max_size=10).map("".join)
PIECES = st.sampled_from((None, "", "", *ODD_TEXT, *map(str, ODD_NUMBERS))) | st.text(string.printable, max_size=3)
"""What comes in the place of another piece; None: that twice."""


def fuzz(cases: int, *, seconds: float = 5.0, **arguments: SearchStrategy[Any]) -> Callable[[Test], Test]:
    """Run a test with that many cases, the same each time unless FUZZ is set. Each may compute for so many seconds."""

    def decorated(test: Test) -> Test:
        @wraps(test)
        def bounded(*fixtures: Any, **drawn: Any) -> None:
            with within(seconds):
                test(*fixtures, **drawn)

        return settings(
            max_examples=max(1, round(cases * TIMES)), derandomize=TIMES == 1, deadline=None, print_blob=True,
            suppress_health_check=list(HealthCheck),
        )(given(**arguments)(bounded))  # fmt: skip

    return decorated


class Hung(Exception):
    """The case did not end in time."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Break off what computes for longer, by the processor's time: a slow machine changes nothing."""

    def over(*_: object) -> None:
        raise Hung(f"computing after {seconds:g} s")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def refusals(*kinds: type[Exception], ours: bool = True) -> Iterator[list[Exception]]:
    """What is refused within is refused clearly, by one of `kinds`, BadInput unless given; then it is in the list.

    `ours`: in the words of this process, and not in what came from another, damaged.
    """
    expected, refused = kinds or (BadInput,), list[Exception]()
    try:
        yield refused
    except Exception as error:
        if not isinstance(error, expected):
            raise
        clear(error, ours=ours)
        refused.append(error)


def clear(error: Exception, *, ours: bool = True) -> None:
    """The error says what it is about: a BadInput its field and what would be accepted."""
    said = str(error)
    assert 0 < len(said) < 4_000, f"an error that says {said[:100]!r}, {len(said)} characters"
    if ours and isinstance(error, BadInput):
        assert error.field and error.accepted, f"a BadInput without field or accepted: {said!r}"  # noqa: PT018
        assert said.startswith(str(error.field)), f"a BadInput that does not begin with its field: {said!r}"


@st.composite
def changed(draw: DrawFn, valid: SearchStrategy[str] | str, most: int = 3) -> str:
    """Text with up to so many pieces lost, doubled, replaced, or put in; none of half of them."""
    text = valid if isinstance(valid, str) else draw(valid)
    for _ in range(draw(st.integers(1 - most, most))):
        place = draw(st.integers(0, len(text)))
        end = min(len(text), place + draw(st.integers(0, 5)))
        piece = draw(PIECES)
        text = text[:place] + (2 * text[place:end] if piece is None else piece) + text[end:]
    return text


def near(valid: SearchStrategy[str] | str, most: int = 3) -> SearchStrategy[str]:
    """Mostly nearly valid text: valid, changed, or noise."""
    return mostly(changed(valid, most), NOISE)


def mostly(usual: SearchStrategy[T], seldom: SearchStrategy[U], tenths: int = 9) -> SearchStrategy[T | U]:
    """So many tenths of one, the rest of the other."""
    return st.integers(1, 10).flatmap(lambda tenth: usual if tenth <= tenths else seldom)


@st.composite
def damaged(draw: DrawFn, sound: bytes, most: int = 4) -> bytes:
    """Bytes with up to so many places flipped, lost, replaced, zeroed, put in, or cut off."""
    data = bytearray(sound)
    for _ in range(draw(st.integers(0, most))):
        place = draw(st.integers(0, len(data)))
        end = min(len(data), place + draw(st.integers(0, 16)))
        how = draw(st.sampled_from(("bit", "bytes", "bytes", "zeros", "cut")))
        if how == "bit" and place < len(data):
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif how == "bytes":
            data[place:end] = draw(st.binary(max_size=8))
        elif how == "zeros":
            data[place:end] = bytes(end - place)
        elif how == "cut":
            del data[place:]
    return bytes(data)


def near_bytes(sound: bytes, most: int = 200) -> SearchStrategy[bytes]:
    """Mostly nearly sound bytes: sound, damaged, or noise."""
    return mostly(damaged(sound), st.binary(max_size=most))
