"""Random calls to a memory store, told as if they had overlapped and some answers had been lost: right by construction.

Each call is done at one instant; it was asked some time before that and answered some time after.
"""

from __future__ import annotations

from random import Random
from typing import Any

from bide.core.answers import Answer
from bide.core.instants import At, Due, In
from bide.core.lifecycle import gone
from bide.core.names import new_id
from bide.core.records import (
    Cancel,
    Filter,
    Lease,
    Move,
    NewTask,
    OnConflict,
    OutcomeKind,
    Page,
    Record,
    Redrive,
    Ref,
    Settlement,
)
from bide.stores.memory import MemoryStore
from bide.testing.history import events as ev
from bide.testing.history.events import Asks, seen

START = 1_800_000_000_000
TOPIC = "t"


class Game:
    """`lossy`: how often an answer is lost. `slow`: the longest, in ms, that a call may be on its way."""

    def __init__(self, chance: Random, *, lossy: float, slow: int, keys: int = 3) -> None:
        self.chance = chance
        self.lossy = lossy
        self.slow = slow
        self.keys = [f"k{number}" for number in range(keys)]
        self.store = MemoryStore()
        self.now = START
        self.placed: list[tuple[int, int, ev.Event]] = []
        """Events with the time at which they are told, and a number that keeps those of one time in order."""
        self.tell(0, ev.Header(room=1_000_000))  # who leases here asks for two, whatever it holds
        self.calls = 0
        self.held: list[tuple[Record, int]] = []
        """What was leased, and when that was answered."""

    async def play(self, steps: int) -> list[ev.Event]:
        await self.store.open()
        for _ in range(steps):
            self.now += self.chance.choice((0, 1, 5, 60, 400))
            await self.chance.choice((self.schedule, self.schedule, self.change, self.look, self.lease, self.outcome))()
        self.now += 100_000
        await self.store.purge(now=self.now, limit=1_000)
        end = self.now + 2 * self.slow + 1
        found = await self.store.find(Filter(), Page(limit=1_000))
        for task in found.tasks:
            self.tell(end, ev.Left(end * 1_000_000, end, task.topic, task.key, seen(task)))
        self.tell(end, ev.End(end * 1_000_000, end, False))
        self.placed.sort(key=lambda placed: placed[:2])
        return [event for _, _, event in self.placed]

    def tell(self, time: int, event: ev.Event) -> None:
        self.placed.append((time, len(self.placed), event))

    def around(self, earliest: int = START) -> tuple[int, int, int]:
        """A call: its number, when it was asked, and when it is answered; 0: never."""
        self.calls += 1
        asked = max(self.now - self.chance.randint(0, self.slow), earliest)
        answered = self.now + self.chance.randint(0, self.slow)
        return self.calls, asked, 0 if self.chance.random() < self.lossy else answered

    def ask(self, call: int, time: int, asks: Asks, key: str, **details: Any) -> None:
        self.tell(time, ev.Asked(call, "client", time * 1_000_000, time, asks, TOPIC, key, **details))

    def answered(self, call: int, time: int, answer: Answer) -> None:
        task = None if answer.record is None else seen(answer.record)
        self.told(call, time, ev.Answered(call, time * 1_000_000, time, answer.result, task, answer.was))

    def told(self, call: int, time: int, event: ev.Event) -> None:
        if time:
            self.tell(time, event)
        elif self.chance.random() < 0.5:
            late = self.now + self.slow
            self.tell(late, ev.Failed(call, late * 1_000_000, True, "lost"))

    def due(self) -> Due:
        return In(self.chance.choice((0, 20, 500))) if self.chance.random() < 0.7 else At(self.now + 30)

    async def known(self, key: str) -> int | None:
        """The token of a task, sometimes that of an earlier version; mostly None."""
        if self.chance.random() >= 0.3:
            return None
        [known] = await self.store.get([Ref(TOPIC, key)])
        return None if known is None else known.token - (self.chance.random() < 0.3)

    async def schedule(self) -> None:
        key = self.chance.choice(self.keys)
        new = NewTask(
            TOPIC, key, new_id(), self.due(), group=self.chance.choice((None, "g")),
            on_conflict=self.chance.choice(list(OnConflict)),
            deadline=self.now + 600 if self.chance.random() < 0.2 else None, if_token=await self.known(key),
        )  # fmt: skip
        call, asked, done = self.around(START if new.if_token is None else self.now)
        self.ask(
            call, asked, Asks.SCHEDULE, new.key, id=new.id, due=new.due, on_conflict=new.on_conflict,
            deadline=new.deadline, if_token=new.if_token,
        )  # fmt: skip
        [answer] = await self.store.add([new], now=self.now)
        self.answered(call, done, answer)

    async def change(self) -> None:
        key, lot = self.chance.choice(self.keys), self.chance.random()
        token = await self.known(key)
        due, (call, asked, done) = self.due(), self.around(START if token is None else self.now)
        keep = self.now + self.chance.choice((-1, 300))
        change: Move | Cancel | Redrive
        if lot < 0.5:
            change, asks = Move(TOPIC, key, due, token), Asks.MOVE
        elif lot < 0.8:
            change, asks = Cancel(TOPIC, key, keep, token), Asks.CANCEL
        else:
            change, asks = Redrive(TOPIC, key, new_id(), due, token), Asks.REDRIVE
        self.ask(
            call, asked, asks, key, id=change.id if isinstance(change, Redrive) else "",
            due=None if isinstance(change, Cancel) else due, if_token=token,
            keeps=keep > self.now if isinstance(change, Cancel) else None,
        )  # fmt: skip
        [answer] = await self.store.change([change], now=self.now)
        self.answered(call, done, answer)

    async def look(self) -> None:
        if self.chance.random() < 0.2:
            await self.store.purge(now=self.now, limit=10)
        key, (call, asked, done) = self.chance.choice(self.keys), self.around()
        self.ask(call, asked, Asks.GET, key)
        [task] = await self.store.get([Ref(TOPIC, key)])
        if task is not None and gone(task, self.now):  # a client shows none of these
            task = None
        answer = ev.Answered(call, done * 1_000_000, done, None, None if task is None else seen(task))
        self.told(call, done, answer)

    async def lease(self) -> None:
        call, asked, done = self.around()
        until = self.now + 150
        self.tell(asked, ev.Leasing(call, "worker", asked * 1_000_000, asked, {TOPIC: 2}, until))
        leased = await self.store.lease({TOPIC: 2}, now=self.now, until=until, holder="worker")
        held = [ev.Held(task.topic, task.key, seen(task)) for task in leased.tasks]
        self.told(call, done, ev.Leased(call, done * 1_000_000, self.now, held, leased.next_wake))
        if done:
            for task in leased.tasks:
                self.held.append((task, done))
                life = (task.id, task.token, task.attempt, task.planned_at)
                self.tell(done, ev.Began("worker", done * 1_000_000, done, TOPIC, task.key, *life))

    async def outcome(self) -> None:
        """Extends or settles something that is held, or was."""
        if not self.held:
            return
        task, since = self.chance.choice(self.held[-4:])
        self.now = max(self.now, since)
        call, asked, done = self.around(since)
        at, lease = asked * 1_000_000, Lease(task.topic, task.key, task.token)
        if self.chance.random() < 0.4:
            until = self.now + self.chance.choice((50, 150, 300))
            self.tell(asked, ev.Extending(call, "worker", at, asked, *lease, until))
            [ok] = await self.store.extend([lease], now=self.now, until=until)
        else:
            verdict = self.chance.choice(list(OutcomeKind))
            again = verdict in (OutcomeKind.RETRY, OutcomeKind.DEFER) or (
                verdict is OutcomeKind.DONE and self.chance.random() < 0.3
            )
            one = Settlement(
                *lease, verdict, self.due() if again else None, self.now + self.chance.choice((-1, 400)),
                "holder lost: often" if verdict is OutcomeKind.DEAD else None, new_id(),
            )  # fmt: skip
            self.held = [held for held in self.held if held[0] is not task]
            details: Any = (one.next_at, one.keep_until, one.error, one.next_id)
            self.tell(asked, ev.Settling(call, "worker", at, asked, *lease, verdict, *details))
            [ok] = await self.store.settle([one], now=self.now)
        self.told(call, done, ev.Told(call, done * 1_000_000, done, ok))
