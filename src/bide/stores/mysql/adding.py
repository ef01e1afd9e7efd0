"""Scheduling: one packet where every key is new; else those that are there are looked at first, under locks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from asyncmy.errors import MySQLError

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, Millis
from bide.core.records import At, Due, NewTask, Result, State
from bide.stores.batches import Conflicts, rounds, wakes_of
from bide.stores.mysql.dialect import Rows, meaning
from bide.stores.mysql.journaled_connection import Call, Repeated
from bide.stores.mysql.operations import MySqlBatch, look_up
from bide.stores.mysql.queries import Code, returns_tokens, tuples
from bide.stores.sql.dialect import Again, Taken
from bide.stores.sql.journaled_connection import Runs
from bide.stores.sql.operations import NO_ANSWERS, AddingBatch, Places, Tell, answers_of, decide_added

_MANY = 32
"""Tasks from which on it is worth another round trip to read the clock, since expressions take time to be read."""
_FIRST_PART, _PART = 64, 512
_COLUMNS = "topic, `key`, id, payload, at, due_at, created_at"


class _Batch:
    """The tasks to add, and their form: found out once, while the server is at work if it can be."""

    __slots__ = ("parts", "plain", "tasks", "tell")

    def __init__(self, tasks: Sequence[NewTask], tell: Callable[[], object]) -> None:
        self.tasks = tasks
        self.tell = tell
        """Tells of the first wake of each topic, once is enough."""
        self.plain = _check_names(tasks)
        """True if all names are ASCII without anything to escape."""
        self.parts: list[Places] = []
        """See `rounds`; none yet before `look`."""

    def look(self) -> None:
        """Find out the parts."""
        if not self.parts:
            self.parts = rounds(self.tasks)

    @property
    def places(self) -> Places:
        """All of them, after `look`. Raises Taken if a key comes twice."""
        if len(self.parts) > 1:
            raise Taken("a key comes twice in a batch")
        return self.parts[0]


async def add(
    connection: Runs,
    tasks: Sequence[NewTask],
    now: Millis | None,
    about: Millis,
    tell: Tell,
    conflicts: Conflicts | None = None,
) -> list[Answer]:
    """Schedule each: one packet where every key is new. `about`: what time it is there, as far as is known."""
    batch = _Batch(tasks, lambda: tell(wakes_of(tasks, about)))
    wary = conflicts is not None and conflicts.likely(tasks)
    if wary or now is not None or len(tasks) < _MANY:
        batch.look()
    if len(batch.parts) <= 1 and not wary:
        with suppress(Taken):
            return await _add_new(connection, batch, now)
    batch.tell()

    async def decided_before(row: Repeated, call: Call) -> list[Answer]:
        return await _complete(call, tasks, answers_of(row.answer or NO_ANSWERS), row)

    begin = partial(_AddingBatch, tasks=tasks, now=now)
    answers: list[Answer] = await decide_added(connection, tasks, tell, begin, kept_of=decided_before)
    if conflicts is not None:
        taken = [new for new, answer in zip(tasks, answers, strict=True) if answer.result is not Result.CREATED]
        conflicts.met(tasks, taken)
    return answers


def _check_names(tasks: Sequence[NewTask]) -> bool:
    """True if all are ASCII without anything to escape. Raises BadInput. All are checked at once, as a rule."""
    text = "".join([f"{new.topic}{new.key}{new.id}{new.group or ''}" for new in tasks])
    if text.isascii() and "\0" not in text:
        return "'" not in text and "\\" not in text
    for new in tasks:
        text = f"{new.topic}{new.key}{new.id}{new.group or ''}"
        if "\0" in text:
            raise BadInput("task", (new.topic, new.key, new.group), "names without NUL")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadInput("task", (new.topic, new.key, new.group), "text without lone surrogates") from None
    return False


async def _add_new(connection: Runs, batch: _Batch, now: Millis | None) -> list[Answer]:
    """Insert all, or raise Taken and insert none: one packet, or of many tasks one that reads the clock before."""
    tasks = batch.tasks

    async def insert(call: Call) -> list[Answer]:
        opened = [*call.begin(now, len(tasks)), *([call.write("first_token")] if now is None else [])]
        if now is None and len(tasks) >= _MANY and call.utc:
            [[(there, micros, first)]] = await call.timed(*opened, call.write("clock_and_token"), meanwhile=batch.look)
            if first <= micros:
                return await _insert_many(call, batch, there)
            opened = []  # the clock was set back: tokens go on from the last
        batch.look()
        places = batch.places
        statements = [*opened, call.write("clock"), *_insertion(call, [tasks[place] for place in places], now)]
        statements += call.pass_gate(_highest(call, now))
        [[(there, _)], tokens] = await call.timed(*statements, commits=True, meanwhile=batch.tell)
        return _created([None] * len(tasks), tasks, places, there, tokens)

    async def inserted(row: Repeated, call: Call) -> list[Answer]:
        return await _complete(call, tasks, [None] * len(tasks), row)

    return await connection.run(insert, inserted, locked="report", adding=True)


async def _insert_many(call: Call, batch: _Batch, there: Millis) -> list[Answer]:
    """In parts: while the server writes one, the answers to the one before are made, and the next is put into words."""
    tasks, places = batch.tasks, batch.places
    answers: list[Any] = [None] * len(tasks)
    sending: asyncio.Task[list[Any]] | None = None
    sent: Places = []
    first, size = 0, _FIRST_PART

    async def answered(sending: asyncio.Task[list[Any]] | None) -> Rows:
        return () if sending is None else (await sending)[0]

    try:
        while first < len(places):
            part, first, size = places[first : first + size], first + size, min(4 * size, _PART)
            last = first >= len(places)
            statements = _insertion(call, [tasks[place] for place in part], None, there=there, plain=batch.plain)
            if last:
                statements += call.pass_gate(_highest(call, None))
            tokens = await answered(sending)
            tell = None if sent else batch.tell
            sending = asyncio.ensure_future(call.send(*statements, commits=last, meanwhile=tell))
            await asyncio.sleep(0)  # it is written before anything else is done
            _created(answers, tasks, sent, there, tokens)
            sent = part
        return _created(answers, tasks, sent, there, await answered(sending))
    except BaseException:
        if sending is not None and not sending.done():
            sending.cancel()
            await asyncio.wait([sending])
        raise


def _highest(call: Call, now: Millis | None) -> Code:
    """No token that this call gave out is higher: what was inserted has that of its moment."""
    return Code(b"@bide_token") if now is not None else Code(b"GREATEST(@bide_token, " + call.there + b")")


def _insertion(
    call: Call, tasks: Sequence[NewTask], now: Millis | None, *, there: Millis | None = None, plain: bool = False
) -> list[bytes]:
    """The statements that insert these, and say with which tokens.

    `there`: the time, if it is known; then each row has the token that is its by itself. `plain`: whether the names
    need no escaping. Rows are put together as text, in which a byte is a character (Latin-1): what needs no escaping is
    in its row in a fifth of the time.
    """
    quote = call.quote

    def text(data: bytes) -> str:
        return quote(data).decode("latin-1")

    plain = plain and call.utc
    payloads = b"".join([new.payload for new in tasks])
    whole = call.utc and b"'" not in payloads and b"\\" not in payloads
    token = ""
    if there is None:
        token = ", @bide_token" if now is not None else f", GREATEST(@bide_token, {call.there.decode()})"
    options = {new.options for new in tasks} != {b""}
    deadlines, groups = {new.deadline for new in tasks} != {None}, {new.group for new in tasks} != {None}
    topics = {topic: text(topic.encode()) for topic in {new.topic for new in tasks}}
    times: dict[Due, str] = {}  # much is due together
    written = []
    for new in tasks:
        when = new.due
        if when not in times:
            times[when] = _times(when, there)
        names = f"'{new.key}', '{new.id}'" if plain else f"{text(new.key.encode())}, {text(new.id.encode())}"
        payload = f"'{new.payload.decode('latin-1')}'" if whole else text(new.payload)
        more = f", {text(new.options)}" if options else ""
        if deadlines:
            more += ", NULL" if new.deadline is None else f", {new.deadline}"
        if groups:
            more += ", NULL" if new.group is None else f", {text(new.group.encode())}"
        written.append(f"({topics[new.topic]}, {names}, {payload}, {times[when]}{token}{more})")
    several = (", token", bool(token)), (", options", options), (", deadline", deadlines), (", group_name", groups)
    columns = _COLUMNS + "".join(column for column, some in several if some)
    rows = Code(", ".join(written).encode("latin-1"))
    statements = [call.write("insert_tasks", columns=Code(columns.encode()), rows=rows)]
    grouped = [
        (Code(b"@bide_row + %d * @@auto_increment_increment" % number), new.group, new.topic, new.key)
        for number, new in enumerate(tasks)
        if new.group is not None
    ]
    apart = not returns_tokens(call.queries["insert_tasks"])
    if apart or grouped:
        statements.append(call.write("first_row"))
    if apart:
        statements.append(call.write("inserted_tokens", count=len(tasks)))
    if grouped:
        statements.append(call.write("join_groups", rows=tuples(grouped, call.quote)))
    return statements


def _times(when: Due, there: Millis | None) -> str:
    """The values of `at`, `due_at` and `created_at`; if the time there is not known the server reckons them."""
    millis = min(max(when.millis, -LAST_INSTANT), LAST_INSTANT)
    if there is not None:
        due = min(max(millis if type(when) is At else there + millis, 0), LAST_INSTANT)
        return f"{max(due, there)}, {due}, {there}"
    if type(when) is At:
        return f"GREATEST({max(millis, 0)}, @bide_now), {max(millis, 0)}, @bide_now"
    if 0 <= millis < LAST_INSTANT // 2:
        return f"@bide_now+{millis}, @bide_now+{millis}, @bide_now"
    reckoned = f"LEAST(GREATEST(@bide_now{millis:+d}, 0), {LAST_INSTANT})"
    return f"{reckoned if millis >= 0 else '@bide_now'}, {reckoned}, @bide_now"


def _created(answers: list[Any], tasks: Sequence[NewTask], places: Places, there: Millis, tokens: Rows) -> list[Answer]:
    """`answers`, with those to what was inserted in these places."""
    schedule = lifecycle.schedule
    for place, (token,) in zip(places, tokens, strict=True):
        answers[place] = schedule(tasks[place], None, there, token)
    return answers


async def _complete(
    call: Call, tasks: Sequence[NewTask], answers: Sequence[Answer | None], row: Repeated
) -> list[Answer]:
    """The answers of a call that was done before: those that it created are looked up.

    One that has gone meanwhile, or was leased or moved, had a token that nobody can use any more: any that is old
    enough will do. Its present one is another's, and the caller was shown none of that.
    """
    missing = [place for place, answer in enumerate(answers) if answer is None]
    there = {(old.topic, old.key): old for old in await look_up(call, [tasks[place] for place in missing])}
    completed: list[Any] = list(answers)
    for place in missing:
        new = tasks[place]
        old = there.get((new.topic, new.key))
        token = row.micros  # the highest that the call gave out
        if old is not None and old.id == new.id:
            untouched = old.state is State.WAITING and old.token <= token
            token = old.token if untouched else min(token, old.token - 1)
        completed[place] = lifecycle.schedule(new, None, row.now, token)
    return completed


class _AddingBatch(MySqlBatch, AddingBatch):
    """Inserts absent tasks by the packet that writes the rest."""

    def __init__(self, call: Call, tasks: Sequence[NewTask], now: Millis | None) -> None:
        super().__init__(call, now, len(tasks))
        if now is None:
            self.begin.append(call.write("first_token"))
        self._tasks = tasks
        self._now = now
        self._free: Places = []
        self._answers: list[Any] = []

    async def insert(self, tasks: Sequence[NewTask], places: Places, answers: list[Any]) -> Places:
        self._free, self._answers = places, answers
        return []

    def statements(self) -> list[bytes]:
        statements = super().statements()
        if self._free:
            statements += _insertion(self.call, [self._tasks[place] for place in self._free], self._now)
        return statements

    def above(self) -> Code:
        return Code(b"GREATEST(%d, %b)" % (self.highest, _highest(self.call, self._now)))

    async def send(self, statements: Sequence[bytes], *, commits: bool = False) -> None:
        """Another caller may have inserted an absent key meanwhile: then all is looked at again."""
        try:
            answers = await self.call.send(*statements, commits=commits)
        except (MySQLError, Taken) as error:
            if isinstance(meaning(error, ""), Taken):
                raise Again("a key was taken meanwhile") from error
            raise
        if self._free:
            _created(self._answers, self._tasks, self._free, self.there, answers[0])
            self._free = []
