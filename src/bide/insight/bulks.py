"""The bulks of an instance, which run in the background; and what every instance knows of all of them.

How far each is, is written into the store once a second: so any instance can show it and stop it, and it is known after
a crash what was done until then. One that has given no sign of life for ten seconds has lost its instance.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from bide.core.errors import BideError, StoreError, StoreFull, StoreUnavailable
from bide.core.instants import Millis
from bide.core.names import SHOWN_TOPIC
from bide.engine.client import Client
from bide.engine.kept import Kept
from bide.insight.bulk import Bulk, May, Meant, Missed
from bide.insight.bulk_run import BulkState, Progress, Run, Still

_log = logging.getLogger("bide.bulk")
AT_ONCE = 4
"""In one instance; others wait."""
LOST_AFTER: Millis = 10_000
"""Without a sign of life for so long, nobody is at work on it."""
_EVERY = 1.0
_MISSED_EVERY = 5
"""The list of what was not done is written so many times less often: it may be some hundred kB long."""
_DAY: Millis = 86_400_000
KEPT: Millis = 9 * _DAY
"""How long it is known how a change ended."""
_MISSED_KEPT: Millis = _DAY
"""And which tasks were not changed as asked. What else is kept to be shown ends within two days: so those that are
kept longer are all bulks, and are listed without reading past the others."""
_LISTED: Millis = 2 * _DAY
_HEAD, _MISSED, _STOP = "change:", "missed:", "stop:"
"""How the names begin under which the progress of a change, its misses and the wish to stop it are kept."""
_CLOSING = 5.0
"""Seconds that batches under way may take when the instance ends."""

_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(Progress).decode
_decode_missed = msgspec.msgpack.Decoder(list[Missed]).decode


async def _always() -> None:
    """Never raises: for callers whose rights do not end."""


class Bulks:
    """Those of one instance. Belongs to the event loop it was made in; `client` is open."""

    def __init__(self, client: Client, instance: str) -> None:
        self._client = client
        self._instance = instance
        self._kept = Kept(client.store, client.clock, SHOWN_TOPIC)
        self._loop = asyncio.get_running_loop()
        self._runs: dict[str, Run] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._closing = False

    async def start(
        self, id: str, bulk: Bulk, may: May, *, who: str, identity: str = "", still: Still = _always
    ) -> bool:
        """Begin it in the background, in the context of the caller: it acts in their name, until `still` raises.

        False where one with this `id` was begun before, here or elsewhere: a resent form starts nothing twice.
        """
        if id in self._runs:
            return False
        now = self._client.clock.now()
        progress = Progress(
            id=id, bulk=msgspec.structs.replace(bulk, chosen=bulk.chosen[:1]), chosen=len(bulk.chosen), who=who,
            instance=self._instance, asked_at=now, alive_at=now, identity=identity,
        )  # fmt: skip
        run = Run(Meant(self._client, bulk, may, now), progress, still)
        self._runs[id] = run  # from here on: a second call finds it, while the store is asked
        try:
            begun = await self._kept.put_if_absent(f"{_HEAD}{id}", _encode(progress), until=now + KEPT)
        except StoreFull:  # a full store still drains: it goes on, and this instance alone knows of it
            begun = True
        except BaseException:
            del self._runs[id]
            raise
        if not begun:
            del self._runs[id]
            return False
        self._tasks[id] = self._loop.create_task(self._carry_out(run), name=f"bide bulk {id}")
        return True

    async def get(self, id: str) -> Progress | None:
        """How far it is; None: never begun, or forgotten. Raises StoreError."""
        run = self._runs.get(id)
        if run is not None:
            return run.progress
        value = await self._kept.get(f"{_HEAD}{id}")
        return None if value is None else _read(id, value)

    async def missed(self, id: str) -> list[Missed]:
        """The first thousand tasks that were not changed as asked; none once they are forgotten."""
        run = self._runs.get(id)
        if run is not None:
            return run.missed
        value = await self._kept.get(f"{_MISSED}{id}")
        return [] if value is None else _decode_missed(value)

    async def all(self) -> list[Progress]:
        """Those of the last days, the newest first. O(found)."""
        now = self._client.clock.now()
        kept = await self._kept.ending(now + _LISTED, now + KEPT + _DAY)
        read = (_read(name, value) for name, value in kept.items() if name.startswith(_HEAD))
        found = {progress.id: progress for progress in read if progress is not None}
        found.update({id: run.progress for id, run in self._runs.items()})
        return sorted(found.values(), key=lambda one: one.asked_at, reverse=True)

    def is_lost(self, progress: Progress) -> bool:
        """True if no instance is at work on it any more, although it is not over."""
        if progress.state.over or progress.id in self._tasks:
            return False
        return progress.alive_at + self._client.clock.span(LOST_AFTER) < self._client.clock.now()

    async def stop(self, id: str, *, who: str) -> None:
        """Have it end after the batch that is being done, whichever instance is at work on it."""
        run = self._runs.get(id)
        if run is not None:
            run.stop(who)
        else:
            until = self._client.clock.now() + _DAY
            await self._kept.put(f"{_STOP}{id}", who.encode(errors="replace"), until=until)

    async def close(self) -> None:
        """End those that run, after the batches that are being done; how far they came is written down."""
        self._closing = True
        for run in self._runs.values():
            run.stop(None)
        if self._tasks:
            _, left = await asyncio.wait(list(self._tasks.values()), timeout=_CLOSING)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)

    # --- in the background

    async def _carry_out(self, run: Run) -> None:
        progress = run.progress
        ended = BulkState.STOPPED
        attending = self._loop.create_task(self._attend(run), name="bide bulk progress")
        try:
            async with self._turns:
                progress.state = BulkState.RUNNING
                progress.started_at = self._client.clock.now()
                if not run.stopping:
                    await self._count(run)
                    await run.go()
                ended = BulkState.STOPPED if run.stopping else BulkState.ENDED
        except BideError as error:
            ended = BulkState.FAILED
            progress.error = str(error)[:500]
        except Exception as error:  # noqa: BLE001 - nobody waits for this task: the page and the log tell
            ended = BulkState.FAILED
            progress.error = f"a defect of the service ({type(error).__name__}): its log says more"
            _log.exception("a defect in the change %s", progress.id)
        finally:
            attending.cancel()
            await asyncio.wait([attending])
            progress.state = ended
            progress.ended_at = progress.alive_at = self._client.clock.now()
            self._tasks.pop(progress.id, None)
            if await self._written(run, missed=True) and not self._closing:
                self._runs.pop(progress.id, None)  # from now on the store tells

    async def _count(self, run: Run) -> None:
        """How many there are, for those who watch."""
        progress = run.progress
        if progress.chosen:
            progress.total = progress.chosen
            return
        try:
            count, _ = await run.meant.total()
        except StoreUnavailable as error:
            _log.info("how many tasks the change %s is about is not known: %s", progress.id, error)
        else:
            progress.total, progress.total_exact = count

    async def _attend(self, run: Run) -> None:
        """Say again and again how far it is, and hear whether somebody wants it to end."""
        written = 0
        turn = 0
        while True:
            await asyncio.sleep(_EVERY)
            turn += 1
            more = turn % _MISSED_EVERY == 0 and len(run.missed) != written
            if await self._written(run, missed=more) and more:
                written = len(run.missed)

    async def _written(self, run: Run, *, missed: bool) -> bool:
        """True if the store has taken it; the rest is written the next time."""
        progress, kept, now = run.progress, self._kept, self._client.clock.now()
        try:
            if not progress.state.over:
                progress.alive_at = now
                who = await kept.get(f"{_STOP}{progress.id}")
                if who is not None:
                    run.stop(who.decode(errors="replace"))
            if missed and run.missed:
                await kept.put(f"{_MISSED}{progress.id}", _encode(run.missed), until=now + _MISSED_KEPT)
            await kept.put(f"{_HEAD}{progress.id}", _encode(progress), until=progress.asked_at + KEPT)
        except StoreError as error:
            _log.warning("how far the change %s is cannot be written down now: %s", progress.id, error)
            return False
        return True


def _read(id: str, value: bytes) -> Progress | None:
    try:
        return _decode(value)
    except msgspec.MsgspecError:
        _log.error("what is kept of the change %s cannot be read and is passed over", id)
        return None
