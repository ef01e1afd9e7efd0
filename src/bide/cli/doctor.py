"""`bide doctor` checks the environment, the store, and the workers on its due tasks; `bide migrate` its schema.

`migrate` creates or upgrades the schema in a database, or says what that would take.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import click

from bide._version import __version__
from bide.app import Bide
from bide.cli.context import Context, takes_context
from bide.cli.exits import Exit
from bide.cli.output import count_words, current_millis, length_words, paused_words, relative_words
from bide.core.errors import BadInput, BideError, SetupError
from bide.core.instants import Millis, as_datetime
from bide.core.names import new_id
from bide.core.records import State
from bide.insight.overview import oldest_due
from bide.ports import Store
from bide.settings import describe
from bide.wiring import check_there, store_maker

_EARLIEST: Millis = 1_735_689_600_000  # 2025-01-01, before this was written: an earlier clock is wrong
_SKEW = 1_000
_WAITED = 5_000
"""Milliseconds that due tasks may wait before a warning."""
_SAMPLE = 200


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Note(NamedTuple):
    level: Level
    what: str
    advice: str = ""


_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "red"}


@click.command()
@takes_context()
def doctor(context: Context) -> Exit:
    """Check the settings, this machine and the store; each line states a finding, and what to do about it.

    The exit code is 1 if a line is an error; with warnings alone it is 0.
    """
    errors = 0

    def report(note: Note) -> None:
        nonlocal errors
        errors += note.level is Level.ERROR
        advice = f"\n{'':8}{click.style(note.advice, dim=True)}" if note.advice else ""
        words = f"{click.style(f'{note.level.value:8}', fg=_COLOURS[note.level])}{note.what}{advice}"
        context.say({"level": note.level.value, "what": note.what, "advice": note.advice}, words)

    for note in check_environment():
        report(note)

    async def examine() -> None:
        check_there(context.settings().store)
        async with Bide(settings=context.settings()) as app:
            report(Note(Level.OK, f"the store opens: {context.shown_store}"))
            for note in await check_store(app):
                report(note)

    try:
        asyncio.run(examine())
    except BideError as error:
        report(Note(Level.ERROR, str(error), "fix this first: nothing else can be checked"))
    return Exit.NOT_DONE if errors else Exit.DONE


def check_environment() -> Iterator[Note]:
    """Check Python, the clock and the environment, without a store."""
    python = platform.python_version()
    fast = "" if importlib.util.find_spec("uvloop") is None else ", uvloop installed (bide work --uvloop)"
    yield Note(Level.OK, f"bide {__version__}, Python {python} on {platform.system()} {platform.machine()}{fast}")
    yield _clock()
    given = {one.variable for one in describe()} | {one.file_variable for one in describe() if one.file_variable}
    names = sorted(name for name in os.environ if name in given)
    yield Note(Level.OK, f"settings from the environment: {', '.join(names) or 'none; all have their defaults'}")


def _clock() -> Note:
    now = current_millis()
    if now < _EARLIEST:
        return Note(Level.ERROR, f"the clock says {as_datetime(now):%Y-%m-%d}", "set it: tasks depend on it")
    before, monotonic = time.time(), time.monotonic()
    time.sleep(0.05)
    drift = abs((time.time() - before) - (time.monotonic() - monotonic)) * 1_000
    if drift > 10:
        return Note(Level.WARNING, f"the clock jumped by {drift:.0f} ms within 50 ms", "have it slewed, not stepped")
    return Note(Level.OK, f"the clock runs evenly; it is {as_datetime(now):%Y-%m-%d %H:%M:%S} UTC")


async def check_store(app: Bide) -> list[Note]:
    """Check the open store: its own findings, its clock, its workers, its dead tasks, its event log."""
    notes: list[Note] = []
    features = app.store.features
    if app.url == "memory:":
        notes.append(Note(Level.WARNING, "memory: is lost when its process ends", "give --store or BIDE_STORE"))
    if features.schema is not None and features.diagnosis is None:
        found, wanted = await features.schema.schema_version()
        level = Level.OK if found == wanted else Level.ERROR
        notes.append(Note(level, f"schema version {found}", "" if found == wanted else f"migrate to {wanted}"))
    if features.diagnosis is not None:
        notes += [
            Note(Level.OK, one.what) if one.ok
            else Note(Level.ERROR if one.severe else Level.WARNING, one.what, one.advice)
            for one in await features.diagnosis.diagnose()
        ]  # fmt: skip
    for check in (_store_clock, _workers, _dead, _log):
        try:
            notes += await check(app)
        except SetupError as error:  # a service allows this token other calls
            notes.append(Note(Level.WARNING, str(error), "this check needs a token that may"))
    return notes


async def _store_clock(app: Bide) -> list[Note]:
    """Compare this machine's clock with the store's, or, if that has none, with the newest event."""
    now = current_millis()  # the app's clock may be the store's
    if (clock := app.store.features.clock) is not None:
        skew = await clock.time() - now
        if abs(skew) > _SKEW:
            what = f"this machine's clock differs from the store's by {length_words(skew)}"
            return [Note(Level.WARNING, what, "bide uses the store's clock; other programs here do not: use NTP")]
        return [Note(Level.OK, f"this machine's clock and the store's agree within {max(1, abs(skew))} ms")]
    events = await app.events(limit=1)
    newest = max((event.at for event in events), default=0)
    if newest > now + _SKEW:
        what = f"the newest event is from the future: {relative_words(newest, now)}"
        return [Note(Level.WARNING, what, "the clock was set back: tasks scheduled before come that much later")]
    return [Note(Level.OK, "no event in the store is from the future")]


async def _workers(app: Bide) -> list[Note]:
    """Check that live workers handle the topics with due tasks."""
    now = app.clock.now()
    tally = await app.tally([as_datetime(0), as_datetime(now), as_datetime(now + 1)])
    due = {topic: counts[0] for topic, counts in tally.forecast.items() if counts and counts[0].number}
    if (workers := app.store.features.workers) is None:
        waiting = f"{sum(count.number for count in due.values()):,} tasks are due"
        return [Note(Level.OK, f"{waiting}; this store does not know the workers")]
    live = await workers.announce(f"doctor:{new_id()[-8:]}", [], now, now=now)
    worked_on = {topic for topics in live.values() for topic in topics}
    number = len(live)
    notes = [
        Note(Level.OK, f"{number} live worker{'' if number == 1 else 's'}"
             + (f", on {', '.join(sorted(worked_on))}" if worked_on else ""))
    ]  # fmt: skip
    paused = await app.paused()
    since = await oldest_due(app, due, now)
    for topic, count in sorted(due.items()):
        oldest = since.get(topic, now)
        words = f"topic {topic}: {count_words(count)} due, the oldest {relative_words(oldest, now)}"
        if topic in paused:
            advice = f"resume it with: bide resume {topic}"
            notes.append(Note(Level.WARNING, f"{words}, held back: {paused_words(paused[topic])}", advice))
        elif topic not in worked_on:
            advice = "start one: bide work MODULE:APP; or cancel these tasks"
            notes.append(Note(Level.ERROR, f"{words}, and no live worker has a handler for it", advice))
        elif now - oldest > _WAITED:
            advice = "its handlers cannot keep up: raise concurrency, or start more workers"
            notes.append(Note(Level.WARNING, words, advice))
    return notes


async def _dead(app: Bide) -> list[Note]:
    counts = (await app.tally()).counts
    dead = {topic: count for (topic, state), count in sorted(counts.items()) if state is State.DEAD and count.number}
    if not dead:
        return [Note(Level.OK, "no dead tasks")]
    words = ", ".join(f"{topic} {count_words(count)}" for topic, count in dead.items())
    advice = "see why: bide ls --state dead; when that is fixed: bide redrive --all-dead"
    return [Note(Level.WARNING, f"dead tasks: {words}", advice)]


async def _log(app: Bide) -> list[Note]:
    if app.store.features.events is None:
        return []
    events = await app.events(limit=_SAMPLE)
    if not events:
        return [Note(Level.OK, "event log: empty")]
    many = f"{len(events)} events" if len(events) < _SAMPLE else f"{_SAMPLE} events or more"
    return [Note(Level.OK, f"event log: {many}, the newest {relative_words(events[0].at, app.clock.now())}")]


@click.command()
@click.option("--check", is_flag=True, help="Only say whether the schema is up to date: exit code 0 if so, else 1.")
@click.option("--print", "as_sql", is_flag=True, help="Print the missing statements, and run none of them.")
@takes_context()
def migrate(context: Context, check: bool, as_sql: bool) -> Exit:
    """Create or upgrade the schema in a database. Any number of processes may do so at once.

    A migration is compatible with older versions, which may go on meanwhile. It needs more privileges than the rest of
    bide: docs/sql.md lists them. A SQLite file and Redis are migrated whenever they are opened.
    """
    if check and as_sql:
        raise BadInput("--check", "together with --print", "one of the two")
    settings = context.settings()
    return asyncio.run(_migrate(context, store_maker(settings.store, settings)(), check=check, as_sql=as_sql))


async def _migrate(context: Context, store: Store, *, check: bool, as_sql: bool) -> Exit:
    where, schema = context.shown_store, store.features.schema
    missing = None if schema is None else await schema.plan()
    if schema is None or missing is None:
        done = "nothing to do"
        if not check and not as_sql:
            await store.open()
            await store.close()
            done = "done"
        context.say(
            {"store": where, "before": None, "found": None, "wanted": None, "up_to_date": True},
            f"{'-- ' if as_sql else ''}{where}: creates and upgrades its schema when it is opened; {done}",
        )
        return Exit.DONE
    if as_sql:
        script = ";\n\n".join(["BEGIN", *missing, "COMMIT"]) + ";"  # runs in one transaction, or not at all
        context.say({"statements": missing}, script if missing else "-- up to date: nothing to run")
        return Exit.DONE
    before, wanted = await schema.schema_version()
    found = before
    if missing and not check:
        await schema.migrate()
        found, _ = await schema.schema_version()
    if found < wanted:
        there = f"its schema is version {found}" if found else "there is no schema"
        words = f"{there}, this bide works with version {wanted}; run `bide migrate`"
    elif found == before:
        words = f"up to date, at version {found}"
    else:
        words = f"brought from version {before} to {found}" if before else f"the schema was made, at version {found}"
    shape = {"store": where, "before": before, "found": found, "wanted": wanted, "up_to_date": found >= wanted}
    context.say(shape, f"{where}: {words}")
    return Exit.DONE if found >= wanted else Exit.NOT_DONE
