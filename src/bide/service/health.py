"""The readiness of this process.

Ready means that requests may be sent here. So the checks cover the needs of requests: the store answers, its schema has
the version that this code needs, and this machine's clock is plausible. A store with several parts is ready while one
of them answers: callers of the other parts get an error, and refusing all callers would not help them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct

from bide.core.errors import SetupError, StoreError
from bide.core.records import Ref
from bide.engine.client import Client
from bide.insight.cached_query import CachedQuery
from bide.ports import Clock, HasClock, HasSchema, Store, SystemClock

_log = logging.getLogger("bide.health")
_PROBE = "bide.health"
_PARTS = 4
"""The most parts of a store that are probed."""
_SLACK = 0.1
"""Seconds beyond the patience for a check to report which part did not answer."""
WARN_OF_SKEW = 1.0
"""Seconds of skew above which the check warns. bide corrects for it."""
MOST_SKEW = 300.0
"""Seconds of skew above which the check fails. Tasks are still on time by the store's clock, but the expiry of tokens
and the times in logs use this machine's."""


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Check(Struct, frozen=True):
    name: str
    level: Level
    sentence: str
    """A sentence in English, with its values in braces. It is public, so it contains no address and no driver's error
    text; those are in the log."""
    values: Mapping[str, object] = {}

    @property
    def what(self) -> str:
        return self.sentence.format(**self.values)


class Readiness(Struct, frozen=True):
    checks: tuple[Check, ...]

    @property
    def ready(self) -> bool:
        return not any(check.level is Level.FAILED for check in self.checks)

    @property
    def status(self) -> int:
        return 200 if self.ready else 503

    def document(self) -> dict[str, Any]:
        checks = [{"name": one.name, "level": one.level.value, "what": one.what} for one in self.checks]
        return {"status": "ready" if self.ready else "not ready", "checks": checks}


class Health:
    """Runs the checks when asked, at most once in `every` seconds. Belongs to the running loop.

    `patience`: the most seconds for each check. A valid schema is checked again after a minute, since on PostgreSQL and
    MySQL that takes a separate connection.
    """

    def __init__(self, client: Client, *, every: float = 1.0, patience: float = 2.0, wall: Clock | None = None) -> None:
        self._client = client
        self._patience = patience
        self._wall = wall or SystemClock()
        self._look = CachedQuery(self._ask, every=every, share=1.0)
        self._was_ready: bool | None = None
        self._schema_until = float("-inf")
        self._schema: Check | None = None
        self._errors: dict[str, str] = {}

    async def ready(self) -> Readiness:
        """The results, at most `every` seconds old. Never raises, and never takes much longer than the patience."""
        return await self._look.get()

    async def _ask(self) -> Readiness:
        self._errors.clear()
        client = self._client
        if client.open_in is None:
            found = Readiness((Check("store", Level.FAILED, "not open yet, or closed"),))
        else:
            store = client.store
            checks = [self._check("store", lambda: reach(store, self._patience))]
            if (schema := store.features.schema) is not None:
                checks.append(self._check("schema", lambda: self._check_schema(schema)))
            if (clock := store.features.clock) is not None:
                checks.append(self._check("clock", lambda: _compare_clocks(clock, self._wall)))
            found = Readiness(tuple(await asyncio.gather(*checks)))
        self._log_change(found)
        return found

    async def _check(self, name: str, look: Callable[[], Awaitable[Check]]) -> Check:
        try:
            async with asyncio.timeout(self._patience + _SLACK):
                return await look()
        except TimeoutError:
            return Check(name, Level.FAILED, "no answer within {seconds} s", {"seconds": f"{self._patience:g}"})
        except StoreError as error:
            self._errors[name] = str(error)
            return Check(name, Level.FAILED, "the store cannot be reached ({error})", {"error": type(error).__name__})
        except Exception as error:  # noqa: BLE001 - a probe always gets an answer
            self._errors[name] = repr(error)
            return Check(name, Level.FAILED, "the check itself failed ({error})", {"error": type(error).__name__})

    async def _check_schema(self, schema: HasSchema) -> Check:
        if self._schema is not None and time.monotonic() < self._schema_until:
            return self._schema
        self._schema = None
        found, wanted = await schema.schema_version()
        values = {"found": found, "wanted": wanted}
        if found < wanted:
            return Check("schema", Level.FAILED, "version {found}, but {wanted} is needed: bide migrate", values)
        if found > wanted:  # during an upgrade: the schema is migrated first, and older programs can use it
            sentence = "version {found}, newer than this program, which knows {wanted}"
            return Check("schema", Level.WARNING, sentence, values)
        self._schema, self._schema_until = Check("schema", Level.OK, "version {found}", values), time.monotonic() + 60
        return self._schema

    def _log_change(self, found: Readiness) -> None:
        before, self._was_ready = self._was_ready, found.ready
        if not found.ready and before is not False:
            bad = [check for check in found.checks if check.level is Level.FAILED]
            said = [f"{check.name}: {self._errors.get(check.name, check.what)}" for check in bad]
            _log.warning("not ready: %s", "; ".join(said))
        elif found.ready and before is False:
            _log.info("ready again")


async def ready(client: Client, *, patience: float = 2.0, wall: Clock | None = None) -> Readiness:
    """Run the checks once, now; see `Health`."""
    return await Health(client, patience=patience, wall=wall).ready()


async def reach(store: Store, patience: float) -> Check:
    """Probe the store by its cheapest call, a get of a task that does not exist; in several parts if it has any."""
    refs = [Ref(_PROBE, "probe")]
    if (parts := store.features.parts) is not None:
        by_part = {parts.part_of(_PROBE, f"probe-{number}"): f"probe-{number}" for number in range(4 * _PARTS)}
        refs = [Ref(_PROBE, key) for key in list(by_part.values())[:_PARTS]]
    asked = [asyncio.ensure_future(store.get([ref])) for ref in refs]
    try:
        answered, silent = await asyncio.wait(asked, timeout=patience)
    finally:
        for one in asked:
            one.cancel()
    errors = [error for one in answered if (error := one.exception()) is not None]
    errors = [error for error in errors if not isinstance(error, SetupError)]  # a service that refuses a token answers
    unexpected = [error for error in errors if not isinstance(error, StoreError)]
    if unexpected or len(errors) == len(refs):
        raise (unexpected or errors)[0]
    if len(errors) + len(silent) == len(refs):
        raise TimeoutError
    if errors or silent:
        values = {"away": len(errors) + len(silent), "asked": len(refs)}
        return Check("store", Level.WARNING, "{away} of {asked} parts do not answer", values)
    return Check("store", Level.OK, "it answers")


async def skew_of(clock: HasClock, wall: Clock) -> float:
    """Seconds by which this machine's clock is ahead of the store's, give or take half a round trip."""
    before = wall.now()
    there = await clock.time()
    return ((before + wall.now()) / 2 - there) / 1000


async def _compare_clocks(clock: HasClock, wall: Clock) -> Check:
    skew = await skew_of(clock, wall)
    if abs(skew) < WARN_OF_SKEW:
        return Check("clock", Level.OK, "within a second of the store's")
    sentence = "this machine's clock is {seconds} s behind the store's"
    if skew > 0:
        sentence = "this machine's clock is {seconds} s ahead of the store's"
    level = Level.WARNING if abs(skew) <= MOST_SKEW else Level.FAILED
    return Check("clock", level, sentence, {"seconds": f"{abs(skew):.1f}"})
