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
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

from bide.ports.wire import CALL_LASTS
from bide.service.replies import Reply

ANSWER_LASTS = CALL_LASTS + 15.0
"""Seconds that an answer is kept."""
SESSION_LASTS = 600.0
"""Seconds that a session lasts without a call."""
MOST_SESSIONS = 10_000
"""Beyond these, of the caller who has most of them, the one that has been silent for longest is forgotten."""
MOST_BYTES = 64 << 20
"""Of answers that are kept; beyond them the oldest of the caller who has most of them are forgotten."""


Work = Callable[[], Coroutine[Any, Any, Reply]]
Key = TypeVar("Key")


class PassedOver(Exception):
    """The number is lower than the last, or its answer is forgotten."""


class _Lane:
    """One operation of one session: its last number, and the work that answers it."""

    number = -1
    work: asyncio.Task[Reply] | None = None


class Session:
    """One client's."""

    def __init__(self, who: str) -> None:
        self.who = who
        self.lanes: defaultdict[str, _Lane] = defaultdict(_Lane)
        """By operation."""


class _ByAge(Generic[Key]):
    """Things of callers, the one that was used longest ago first; each has its owner and a weight."""

    def __init__(self) -> None:
        self._all: OrderedDict[Key, tuple[str, int, float]] = OrderedDict()
        self._weights: Counter[str] = Counter()
        self.weight = 0

    def put(self, one: Key, who: str, weight: int, now: float) -> None:
        """It is used now."""
        self.drop(one)
        self._all[one] = (who, weight, now)
        self._weights[who] += weight
        self.weight += weight

    def drop(self, one: Key) -> None:
        who, weight, _ = self._all.pop(one, ("", 0, 0.0))
        self._weights[who] -= weight
        self.weight -= weight
        if not self._weights[who]:
            del self._weights[who]

    def surplus(self, before: float, most: int) -> Iterator[Key]:
        """Drops and yields those last used until then; while the others weigh more than `most`, the oldest of the
        caller who has most."""
        while self._all:
            one, (_, _, used) = next(iter(self._all.items()))
            if used > before:
                if self.weight <= most:
                    break
                [(greedy, _)] = self._weights.most_common(1)
                one = next(one for one, (who, _, _) in self._all.items() if who == greedy)
            self.drop(one)
            yield one


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
        self._sessions: dict[str, Session] = {}
        self._names: _ByAge[str] = _ByAge()
        self._answers: _ByAge[_Lane] = _ByAge()
        """The lanes whose answer is kept."""
        self._under_way: set[asyncio.Task[Reply]] = set()
        self._most_bytes = most_bytes
        self._most_sessions = most_sessions

    def begin(self, who: str, *, writes: bool = True) -> str:
        """A new session, for this caller alone; nothing is kept for one who only reads."""
        now, name = self._clock(), self._prefix + secrets.token_urlsafe(16)
        for old in self._names.surplus(now - SESSION_LASTS, self._most_sessions - writes):
            del self._sessions[old]
        self._forget_answers(now)
        if writes:
            self._sessions[name] = Session(who)
            self._names.put(name, who, 1, now)
        return name

    def began(self, name: str) -> bool:
        """Tell whether a session of this name began here."""
        return name.startswith(self._prefix)

    def session(self, name: str, who: str) -> Session | None:
        """The session, if it is theirs and was not forgotten."""
        session = self._sessions.get(name)
        if session is None or session.who != who:
            return None
        self._names.put(name, who, 1, self._clock())
        return session

    async def once(self, session: Session, operation: str, number: int, work: Work) -> Reply:
        """The answer to this number: of `work`, which is done now, or of the call that came first.

        The work goes on when its caller has gone. Raises PassedOver.
        """
        lane = session.lanes[operation]
        if number < lane.number or (number == lane.number and lane.work is None):
            raise PassedOver
        if number > lane.number:
            self._answers.drop(lane)
            task = asyncio.get_running_loop().create_task(self._run(lane.work, work), name=f"bide {operation} call")
            lane.number, lane.work = number, task
            self._under_way.add(task)
            task.add_done_callback(partial(self._keep, lane, session.who))
            self._forget_answers(self._clock())
        assert lane.work is not None
        return await asyncio.shield(lane.work)

    async def _run(self, before: asyncio.Task[Reply] | None, work: Work) -> Reply:
        """In the order of the numbers: one that its caller has given up may still be under way."""
        if before is not None and not before.done():
            await asyncio.wait([before])
        return await work()

    def _keep(self, lane: _Lane, who: str, done: asyncio.Task[Reply]) -> None:
        self._under_way.discard(done)
        if lane.work is done and not done.cancelled() and done.exception() is None:
            self._answers.put(lane, who, len(done.result().body), self._clock())

    def _forget_answers(self, now: float) -> None:
        for lane in self._answers.surplus(now - ANSWER_LASTS, self._most_bytes):
            lane.work = None

    async def close(self) -> None:
        """Wait for the work that is under way."""
        if self._under_way:
            await asyncio.wait(self._under_way)
