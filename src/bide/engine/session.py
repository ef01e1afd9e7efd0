"""An open client's way to its store: batched, or straight into the transaction that the caller is inside of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bide.core.answers import Answer
from bide.core.events import Event, EventKind
from bide.core.records import Cancel, Change, In, Move, NewTask, Record, Redrive, Ref, Result
from bide.engine.batcher import Batcher
from bide.engine.joining import joined_to
from bide.engine.recorder import Recorder
from bide.ports import Clock, Store, Verbs

_CHANGED = frozenset(
    {Result.CREATED, Result.REPLACED, Result.MOVED, Result.CANCELLED, Result.CANCELLED_WHILE_LEASED, Result.REDRIVEN}
)


class Session:
    """Belongs to the event loop it was made in. With an `actor`, every change that took place is noted as theirs."""

    def __init__(self, store: Store, clock: Clock, actor: str | None) -> None:
        self.store = store
        self.loop = asyncio.get_running_loop()
        self.recorder = Recorder(store)
        self._clock = clock
        self._actor = actor
        self._gets: Batcher[Ref, Record | None] = Batcher(store.get)
        self._adds: Batcher[NewTask, Answer] = Batcher(lambda batch: store.add(batch, now=clock.now()))
        self._changes: Batcher[Change, Answer] = Batcher(lambda batch: store.change(batch, now=clock.now()))

    @property
    def verbs(self) -> Verbs:
        """The open transaction on this store that the caller is inside of, else the store."""
        return joined_to(self.store) or self.store

    async def get(self, ref: Ref) -> Record | None:
        joined = joined_to(self.store)
        return (await joined.get([ref]))[0] if joined else await self._gets.ask(ref)

    async def add(self, new: NewTask) -> Answer:
        joined = joined_to(self.store)
        answer = (await joined.add([new], now=self._clock.now()))[0] if joined else await self._adds.ask(new)
        if self._actor is not None:
            self.note("schedule", [answer])
        return answer

    async def add_many(self, tasks: Sequence[NewTask]) -> list[Answer]:
        """In bulk only what replaced something is noted: a load of new tasks would push all else out of the log."""
        answers = await self.verbs.add(tasks, now=self._clock.now())
        if self._actor is not None:
            self.note("schedule", [answer for answer in answers if answer.result is Result.REPLACED])
        return answers

    async def change(self, change: Change) -> Answer:
        joined = joined_to(self.store)
        answer = (
            (await joined.change([change], now=self._clock.now()))[0] if joined else await self._changes.ask(change)
        )
        if self._actor is not None:
            self.note(verb_of(change), [answer])
        return answer

    async def change_many(self, changes: Sequence[Change]) -> list[Answer]:
        answers = await self.verbs.change(changes, now=self._clock.now())
        if self._actor is not None and changes:
            self.note(verb_of(changes[0]), answers)
        return answers

    def note(self, verb: str, answers: Sequence[Answer]) -> None:
        """Note the changes among `answers` as the actor's; without one, nothing."""
        if self._actor is None:
            return
        now = self._clock.now()
        for answer in answers:
            record = answer.record
            if record is not None and answer.result in _CHANGED:
                self.recorder.note(
                    Event(
                        at=now, topic=record.topic, key=record.key, id=record.id, kind=EventKind.CHANGE,
                        attempt=record.attempt, who=self._actor, what=f"{verb}: {answer.result.value}", was=answer.was,
                        wake_at=record.wake_at if record.state.live else None,
                    )
                )  # fmt: skip

    async def close(self) -> None:
        """Wait for calls under way, then close the store."""
        for batcher in (self._adds, self._changes, self._gets):
            await batcher.drain()
        await self.recorder.close()
        await self.store.close()


def verb_of(change: Change) -> str:
    """The caller's word for `change`."""
    if type(change) is Cancel:
        return "cancel"
    if type(change) is Redrive:
        return "redrive"
    return "fire_now" if type(change) is Move and change.due == In(0) else "reschedule"
