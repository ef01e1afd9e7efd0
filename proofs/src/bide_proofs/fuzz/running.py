"""Runs the cases of a target one by one, each within a bounded time, and keeps what was found."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct

from bide.core.errors import BadInput
from bide_proofs.fuzz.drawing import Draw

Case: TypeAlias = Callable[[Draw], Awaitable[None]]
"""One case; it raises Wrong, or whatever escapes from the code that is tried."""
Opened: TypeAlias = Callable[[Path], AbstractAsyncContextManager[Case]]
_SHOWN = 400
_PATIENCE = 60.0
"""Seconds in which a case may wait for something: by then it hangs, however busy the machine is."""


class Wrong(AssertionError):
    """What came back is not right."""


class Hung(Exception):
    """The case did not end in time."""


class Target(Struct, frozen=True):
    """Something that reads, and how it is tried."""

    name: str
    about: str
    open: Opened
    """Given a folder of its own, a context in which its cases can be run."""
    limit: float = 5.0
    """Seconds that one case may compute."""
    weight: float = 1.0
    """Its part of a run's time."""
    needs: str = ""
    """A program that it needs on this machine."""


class Find(Struct, frozen=True):
    """One bug, as the first case shows it."""

    case: int
    what: str
    place: str
    """Where in bide, or in the oracle, it came up: finds of one place count once."""
    story: str


class Outcome(Struct):
    """What one run of a target came to."""

    target: str
    seed: int
    cases: int
    seconds: float
    finds: list[Find]
    labels: Counter[str]
    """How many cases ended like what, where a target tells."""


def check(truth: object, what: str) -> None:
    """Raises Wrong unless so."""
    if not truth:
        raise Wrong(what)


@contextmanager
def refusals(*kinds: type[Exception]) -> Iterator[None]:
    """What is refused within is refused clearly, by one of `kinds`: BadInput unless they are given."""
    accepted = kinds or (BadInput,)
    try:
        yield
    except accepted as error:
        clear(error)


def clear(error: Exception) -> None:
    """Raises Wrong unless the error says what it is about: a BadInput its field and what would be accepted."""
    said = str(error)
    check(said and len(said) < 4_000, f"an error that says {said[:100]!r}, {len(said)} characters")
    if isinstance(error, BadInput):
        check(error.field and error.accepted, f"a BadInput without field or accepted: {said!r}")
        check(said.startswith(str(error.field)), f"a BadInput that does not begin with its field: {said!r}")


def pure(case: Callable[[Draw], None]) -> Opened:
    """Of a target that needs nothing."""

    @asynccontextmanager
    async def open_(_: Path) -> AsyncIterator[Case]:
        async def run(draw: Draw) -> None:
            case(draw)

        yield run

    return open_


async def run(
    target: Target, folder: Path, *, seed: int, cases: int | None = None, seconds: float | None = None, first: int = 0
) -> Outcome:
    """So many cases, or as many as can be begun within so many seconds; each failure is kept, one of each place."""
    outcome = Outcome(target.name, seed, 0, 0.0, [], Counter())
    places: set[str] = set()
    began = time.monotonic()
    async with target.open(folder) as case:
        for number in itertools.count(first):
            if number - first == cases or (seconds is not None and time.monotonic() - began >= seconds):
                break
            draw = Draw(f"{seed}/{target.name}/{number}")
            outcome.cases += 1
            try:
                with _bounded(target.limit):
                    async with asyncio.timeout(_PATIENCE):
                        await case(draw)
            except Exception as error:  # noqa: BLE001 - whatever escapes is what is looked for
                find = _find(number, draw, error)
                if find.place not in places:
                    places.add(find.place)
                    outcome.finds.append(find)
            outcome.labels.update(draw.labels)
    outcome.seconds = time.monotonic() - began
    return outcome


@contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """Breaks off what computes for longer, by the processor's time; only the main thread can be broken off."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_: Any) -> None:
        raise Hung(f"computing after {seconds:g} s")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _find(number: int, draw: Draw, error: Exception) -> Find:
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).parent)
    ours = [frame for frame in frames if "/bide/" in frame.filename and not frame.filename.startswith(here)]
    last = (ours or frames)[-1]
    if isinstance(error, Wrong):
        oracle = [frame for frame in frames if frame.name not in ("check", "clear", "refusals")]
        last = oracle[-1]
    what = f"{type(error).__name__}: {str(error)[:_SHOWN]}"
    place = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno} {last.name}"
    said = "; ".join(note if len(note) <= _SHOWN else f"{note[: _SHOWN - 1]}…" for note in draw.notes)
    return Find(number, what, place, said)
