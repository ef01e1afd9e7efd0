"""Idempotency: the answers to each client's last calls, for as long as it may send those calls again.

A client begins a session, and numbers its writing calls in it, for each operation by itself. The answer to the last
number is kept, so a call whose answer was lost is sent again and answered the same; one that is still under way is
waited for. A number that is lower was passed over, and is refused: a call that was delayed on the way from before a
change cannot undo it. A session that is not known here is refused before anything is done, so a call from before a
restart, or from before a client was forgotten, does nothing either.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple

from bide.ports.wire import CALL_LASTS

ANSWER_LASTS = CALL_LASTS + 15.0
"""Seconds that an answer is kept."""
SESSION_LASTS = 600.0
"""Seconds that a session lasts without a call."""
MOST_SESSIONS = 10_000
"""Beyond these, of the caller who has most of them, the one that has been silent for longest is forgotten."""
MOST_BYTES = 64 << 20
"""Of answers that are kept; beyond them the oldest of the caller who has most of them are forgotten."""


class Answered(NamedTuple):
    """An answer to a call: an HTTP status, the body and its headers."""

    status: int
    body: bytes
    headers: dict[str, str]


Work = Callable[[], Coroutine[Any, Any, Answered]]


class PassedOver(Exception):
    """The number is lower than the last, or its answer is forgotten."""


class _Lane:
    """One operation of one session: its last number, and the work that answers it."""

    __slots__ = ("number", "who", "work")

    def __init__(self, who: str) -> None:
        self.number = -1
        self.who = who
        self.work: asyncio.Task[Answered] | None = None


class Session:
    """One client's."""

    __slots__ = ("lanes", "used", "who")

    def __init__(self, who: str, now: float) -> None:
        self.who = who
        self.used = now
        self.lanes: dict[str, _Lane] = {}


class Sessions:
    """All sessions of this instance. Belongs to one event loop."""

    def __init__(
        self,
        *,
        most_bytes: int = MOST_BYTES,
        most_sessions: int = MOST_SESSIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._prefix = f"{secrets.token_urlsafe(6)}."
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._kept: OrderedDict[asyncio.Task[Answered], tuple[float, _Lane]] = OrderedDict()
        """Answers, the oldest first: when each was given, and the lane that it belongs to."""
        self._bytes = 0
        self._sessions_of: Counter[str] = Counter()
        self._bytes_of: Counter[str] = Counter()
        """Both by caller, without those who have none."""
        self._under_way: set[asyncio.Task[Answered]] = set()
        self._most_bytes = most_bytes
        self._most_sessions = most_sessions

    def begin(self, who: str, *, writes: bool = True) -> str:
        """A new session, for this caller alone; nothing is kept for one who only reads."""
        self._forget()
        name = self._prefix + secrets.token_urlsafe(16)
        if not writes:
            return name
        while len(self._sessions) >= self._most_sessions:
            greedy = _greediest(self._sessions_of)
            self._end(next(name for name, session in self._sessions.items() if session.who == greedy))
        self._sessions[name] = Session(who, self._clock())
        self._sessions_of[who] += 1
        return name

    def _end(self, name: str) -> None:
        _less(self._sessions_of, self._sessions.pop(name).who, 1)

    def began(self, name: str) -> bool:
        """Whether a session of this name began here."""
        return name.startswith(self._prefix)

    def session(self, name: str, who: str) -> Session | None:
        """The session, if it is theirs and was not forgotten."""
        session = self._sessions.get(name)
        if session is None or session.who != who:
            return None
        session.used = self._clock()
        self._sessions.move_to_end(name)
        return session

    async def once(self, session: Session, operation: str, number: int, work: Work) -> Answered:
        """The answer to this number: of `work`, which is done now, or of the call that came first.

        The work goes on when its caller has gone. Raises PassedOver.
        """
        lane = session.lanes.setdefault(operation, _Lane(session.who))
        if number < lane.number or (number == lane.number and lane.work is None):
            raise PassedOver
        if number > lane.number:
            before, lane.number = lane.work, number
            if before is not None:
                self._drop(before)
            lane.work = asyncio.get_running_loop().create_task(self._run(before, work), name=f"bide {operation} call")
            self._under_way.add(lane.work)
            lane.work.add_done_callback(partial(self._keep, lane))
            self._forget()
        assert lane.work is not None
        return await asyncio.shield(lane.work)

    async def _run(self, before: asyncio.Task[Answered] | None, work: Work) -> Answered:
        """In the order of the numbers: one that its caller has given up may still be under way."""
        if before is not None and not before.done():
            await asyncio.wait([before])
        return await work()

    def _keep(self, lane: _Lane, done: asyncio.Task[Answered]) -> None:
        self._under_way.discard(done)
        if lane.work is done and not done.cancelled() and done.exception() is None:
            self._kept[done] = (self._clock(), lane)
            size = len(done.result().body)
            self._bytes += size
            self._bytes_of[lane.who] += size

    def _drop(self, done: asyncio.Task[Answered]) -> None:
        kept = self._kept.pop(done, None)
        if kept is not None:
            size = len(done.result().body)
            self._bytes -= size
            _less(self._bytes_of, kept[1].who, size)

    def _forget(self) -> None:
        """Drop the answers and sessions that are older than they need be, or too many."""
        now = self._clock()
        while self._kept:
            oldest, (given, lane) = next(iter(self._kept.items()))
            if now - given < ANSWER_LASTS:
                if self._bytes <= self._most_bytes:
                    break
                greedy = _greediest(self._bytes_of)
                oldest, lane = next((done, lane) for done, (_, lane) in self._kept.items() if lane.who == greedy)
            self._drop(oldest)
            if lane.work is oldest:
                lane.work = None
        while self._sessions:
            name, session = next(iter(self._sessions.items()))
            if now - session.used < SESSION_LASTS:
                break
            self._end(name)

    async def close(self) -> None:
        """Wait for the work that is under way."""
        if self._under_way:
            await asyncio.wait(self._under_way)


def _greediest(counts: Counter[str]) -> str:
    """The caller who has most."""
    [(who, _)] = counts.most_common(1)
    return who


def _less(counts: Counter[str], who: str, number: int) -> None:
    counts[who] -= number
    if not counts[who]:
        del counts[who]
