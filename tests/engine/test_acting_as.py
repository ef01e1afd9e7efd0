"""One client, many callers: who did it is noted per call, and whoever listens hears every change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from bide import Answer, Bide, Result, StoreUnavailable
from bide.core.errors import PartlyFailed
from bide.core.records import Change
from bide.engine.session import acting_as, current_caller
from bide.stores.memory import MemoryStore

Heard = list[tuple[str, list[str], str]]


def listener(heard: Heard) -> Any:
    def told(verb: str, answers: Sequence[Answer], who: str) -> None:
        heard.append((verb, [answer.result.value for answer in answers], who))

    return told


async def changes(app: Bide) -> list[tuple[str | None, str]]:
    """Who did what, the oldest first."""
    return [(event.who, event.what) for event in reversed(await app.events())]


async def test_every_verb_is_theirs_who_acts() -> None:
    heard: Heard = []
    async with Bide("memory:", actor="the service") as app:
        await app.schedule("t", 1, key="mine", group="g", delay="1h")
        with acting_as("ann", listener(heard)):
            await app.schedule("t", 1, key="k", group="g", delay="1h")
            await app.schedule("t", 2, key="k", group="g", delay="2h")
            await app.schedule_many(
                [app.new("t", 1, key="k", group="g", delay="1h"), app.new("t", key="x", delay="1h")]
            )
            await app.reschedule("t", "k", delay="3h")
            await app.fire_now("t", "k")
            await app.fire_now("t", "gone")
            await app.reschedule_many([(("t", "k"), "0s"), (("t", "x"), "2h")])
            await app.fire_many([("t", "x")])
            await app.reschedule_many([(("t", "k"), "1h")])
            await app.reschedule_many([])
            await app.shift("g", "1h")
            await app.cancel_group("g")
            await app.cancel_many([("t", "x")])
        assert current_caller() is None
        await app.schedule("t", 1, key="mine", delay="1h")

        assert heard == [
            (verb, results.split(), "ann")
            for verb, results in (
                ("schedule", "created"), ("schedule", "replaced"), ("schedule", "replaced created"),
                ("reschedule", "moved"), ("fire_now", "moved"), ("fire_now", "not_found"),
                ("reschedule", "moved moved"), ("fire_now", "moved"), ("reschedule", "moved"), ("shift", "moved moved"),
                ("cancel", "cancelled cancelled"), ("cancel", "cancelled"),
            )
        ]  # fmt: skip
        noted = await changes(app)
        assert [who for who, _ in noted] == ["the service", *["ann"] * 13, "the service"]
        assert [what for _, what in noted] == [
            "schedule: created", *["schedule: replaced"] * 2, "reschedule: moved", "fire_now: moved",
            *["reschedule: moved"] * 2, "fire_now: moved", "reschedule: moved", *["shift: moved"] * 2,
            *["cancel: cancelled"] * 3, "schedule: replaced",
        ], "new tasks of theirs are not noted: they would push all else out of the log"  # fmt: skip


async def test_calls_that_are_folded_together_stay_each_callers_own() -> None:
    heard: Heard = []

    async def one(app: Bide, number: int) -> None:
        with acting_as(f"caller {number}", listener(heard)):
            await app.cancel("t", str(number))

    async with Bide("memory:") as app:
        await app.schedule_many([app.new("t", key=str(number), delay="1h") for number in range(50)])
        await asyncio.gather(*(one(app, number) for number in range(50)))
        assert sorted(who for _, _, who in heard) == sorted(f"caller {number}" for number in range(50))
        events = await app.events()
        assert {(event.who, event.key) for event in events} == {(f"caller {n}", str(n)) for n in range(50)}


class Slow(MemoryStore):
    """Changes wait until they may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def change(self, changes: Sequence[Change], *, now: int) -> list[Answer]:
        self.asked.set()
        await self.may.wait()
        return await super().change(changes, now=now)


@pytest.mark.parametrize("plural", [False, True])
async def test_who_hangs_up_is_heard_all_the_same(plural: bool) -> None:
    heard: Heard = []
    told = asyncio.Event()

    def tell(verb: str, answers: Sequence[Answer], who: str) -> None:
        listener(heard)(verb, answers, who)
        told.set()

    store = Slow()
    async with Bide(store) as app:
        await app.schedule("t", key="k", group="g", delay="1h")
        with acting_as("mallory", tell):
            verb = app.cancel_group("g") if plural else app.cancel("t", "k")
            calling = asyncio.get_running_loop().create_task(verb)
        await store.asked.wait()
        calling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await calling
        assert calling.cancelled()
        assert heard == []
        store.may.set()
        await told.wait()
        assert heard == [("cancel", ["cancelled"], "mallory")]
        assert await changes(app) == [("mallory", "cancel: cancelled")]


class Halved(MemoryStore):
    """The first change of a batch is done, the others fail."""

    async def change(self, changes: Sequence[Change], *, now: int) -> list[Answer]:
        [first] = await super().change(changes[:1], now=now)
        raise PartlyFailed([first, *(StoreUnavailable("away") for _ in changes[1:])])


async def test_of_a_batch_that_partly_failed_the_rest_is_noted() -> None:
    heard: Heard = []
    async with Bide(Halved()) as app:
        await app.schedule_many([app.new("t", key=key, group="g", delay="1h") for key in "abc"])
        with acting_as("ann", listener(heard)):
            with pytest.raises(PartlyFailed):
                await app.cancel_many([("t", "a"), ("t", "b")])
            with pytest.raises(PartlyFailed):
                await app.cancel_group("g")
        assert heard == [("cancel", ["cancelled"], "ann")] * 2
        assert await changes(app) == [("ann", "cancel: cancelled")] * 2


async def test_what_failed_is_not_heard() -> None:
    heard: Heard = []

    class Away(MemoryStore):
        async def change(self, changes: Sequence[Change], *, now: int) -> list[Answer]:
            raise StoreUnavailable("away")

    async with Bide(Away()) as app:
        with acting_as("ann", listener(heard)):
            with pytest.raises(StoreUnavailable):
                await app.cancel("t", "k")
            assert (await app.schedule("t", key="k", delay="1h")).result is Result.CREATED
        assert heard == [("schedule", ["created"], "ann")]
