"""The verbs that write: they group a batch by shard and topic, and return the answers in the caller's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from bide.core import lifecycle
from bide.core.answers import Answer
from bide.core.instants import LAST_INSTANT, At, Due, Millis
from bide.core.records import (
    Cancel,
    Change,
    Lease,
    Move,
    NewTask,
    OnConflict,
    OutcomeKind,
    Redrive,
    Result,
    Settlement,
    Token,
)
from bide.stores.redis.layout import NO_DEADLINE, NO_ERROR, Layout, flags_of, packed_id, record_of, seed_of
from bide.stores.redis.script_client import Call

Asked = TypeVar("Asked", NewTask, Change, Lease, Settlement)
Arguments = list[str | bytes | int]
_MOST = 1_000
"""The most tasks in one script call, about 5 ms of the server, so that no other call waits for long."""

_MODES = {OnConflict.REPLACE: "r", OnConflict.KEEP: "k", OnConflict.EARLIEST: "e", OnConflict.LATEST: "l",
          OnConflict.REFUSE: "f"}  # fmt: skip
_TAKEN = {b"k": Result.KEPT, b"f": Result.REFUSED, b"s": Result.STALE_TOKEN}
_CHANGED = {
    b"m": Result.MOVED, b"u": Result.UNDER_WAY, b"f": Result.FINISHED, b"s": Result.STALE_TOKEN,
    b"n": Result.NOT_FOUND, b"x": Result.REFUSED, b"c": Result.CANCELLED, b"w": Result.CANCELLED_WHILE_LEASED,
    b"r": Result.REDRIVEN,
}  # fmt: skip
_VERDICTS = {OutcomeKind.DONE: 0, OutcomeKind.RETRY: 2, OutcomeKind.DEFER: 3, OutcomeKind.DEAD: 4}
_NOTHING = b"+0"
_NOBODYS: Token = 2**56 - 1
"""A number above every possible token."""

Places = list[int]
Words = Callable[[Any], Arguments]
"""Makes a script's arguments for one task."""
Take = Callable[[Sequence[Any], Places, list[Any], list[Any]], None]
"""Reads one shard's reply to the tasks at some places of a batch, and stores the answers at these places."""


def sorted_out(
    asked: Sequence[Asked], layout: Layout, words: Words, *before: int
) -> tuple[Iterator[Call], list[Places]]:
    """The calls for `asked`, made lazily, and for each call the places of its answers."""
    shards: dict[int, dict[str, Places]] = {}
    shard_of = layout.shard_of
    for place, one in enumerate(asked):
        topic = one.topic
        shard = shard_of(topic, one.key)
        topics = shards.get(shard)
        if topics is None:
            shards[shard] = {topic: [place]}
        elif topic in topics:
            topics[topic].append(place)
        else:
            topics[topic] = [place]

    def calls() -> Iterator[Call]:
        for shard, topics in shards.items():
            arguments: Arguments = [*before]
            for mine in topics.values():
                arguments.append(len(mine))
                for place in mine:
                    arguments += words(asked[place])
            yield Call(shard, list(topics), arguments)

    return calls(), [[place for mine in topics.values() for place in mine] for topics in shards.values()]


def by_load(asked: Sequence[Asked], shards: int) -> list[Sequence[Asked]]:
    """Parts that give no shard much more than `_MOST` tasks in one call."""
    size = _MOST * shards
    return [asked[first : first + size] for first in range(0, len(asked), size)] if len(asked) > size else [asked]


def when(due: Due) -> str:
    """An instant, or a length from now, in the scripts' format."""
    if type(due) is At:
        return str(min(max(due.millis, 0), LAST_INSTANT))
    return f"{due.millis:+d}"


def new_writer() -> Callable[[NewTask], Arguments]:
    """Most tasks of a batch differ only in key, id and payload, so the arguments for the rest are made once."""
    said: dict[tuple[OnConflict, int, type[Due], Millis], str] = {}

    def write(new: NewTask) -> Arguments:
        flags, due = flags_of(new), new.due
        alike = (new.on_conflict, flags, type(due), due.millis)
        how = said.get(alike)
        if how is None:
            how = said[alike] = _MODES[new.on_conflict] + chr(flags) + when(due)
        if new.if_token is not None:
            how = f"{how[0].upper()}{how[1:]} {_condition(new.if_token)}"
        return [new.key, how, seed_of(new, flags)]

    return write


def take_added(tasks: Sequence[NewTask], places: Places, reply: list[Any], answers: list[Any]) -> None:
    _, now_there, token, *odd = reply
    for place in places:
        answers[place] = lifecycle.schedule(tasks[place], None, now_there, token)
        token += 1
    for first in range(0, len(odd), 4):
        number, word, body, was = odd[first : first + 4]
        place = places[number]
        new = tasks[place]
        if word == b"p":
            answers[place] = Answer(Result.REPLACED, answers[place].record, None if was < 0 else was)
        else:
            answers[place] = Answer(_TAKEN[word], record_of(new.topic, new.key, body))


def _condition(if_token: Token | None) -> Token:
    """The token as the script's condition: 0 for none, and a token that no task has for an impossible one."""
    if if_token is None:
        return 0
    return if_token if 0 < if_token < _NOBODYS else _NOBODYS


def write_change(change: Change) -> Arguments:
    token = _condition(change.if_token).to_bytes(7, "big")
    if type(change) is Cancel:
        keep = min(max(change.keep_until, 0), NO_DEADLINE).to_bytes(6, "big")
        return [change.key, b"".join((b"\1", token, keep, b"\0" * 6, b"\2", _NOTHING))]
    if type(change) is Move:
        deadline = NO_DEADLINE if change.deadline is None else change.deadline
        text = when(change.due).encode()
        return [
            change.key,
            b"".join((b"\0", token, b"\0" * 6, deadline.to_bytes(6, "big"), len(text).to_bytes(1, "big"), text)),
        ]
    assert type(change) is Redrive
    text = when(change.due).encode()
    what = (b"\2", token, b"\0" * 12, len(text).to_bytes(1, "big"), text, packed_id(change.id))
    return [change.key, b"".join(what)]


def take_changed(changes: Sequence[Change], places: Places, reply: list[Any], answers: list[Any]) -> None:
    at = 2
    for place in places:
        asked, body, was = changes[place], reply[at + 2], reply[at + 1]
        record = record_of(asked.topic, asked.key, body) if body else None
        answers[place] = Answer(_CHANGED[reply[at]], record, None if was < 0 else was)
        at += 3


def write_lease(lease: Lease) -> Arguments:
    return [lease.key, lease.token]


def take_accepted(asked: Sequence[Any], places: Places, reply: list[Any], answers: list[Any]) -> None:
    for place, yes in zip(places, reply[2:], strict=True):
        answers[place] = yes == 1


def settlement_writer(now: Millis) -> Callable[[Settlement], Arguments]:
    """`now`: a task done with `keep_until` at or before it is forgotten at once."""

    def write(one: Settlement) -> Arguments:
        verdict = one.outcome
        if verdict is OutcomeKind.DONE and one.next_at is None and one.keep_until <= now:
            return [one.key, one.token, b""]
        error = b"" if one.error is None else one.error.encode()
        text = b"+0" if one.next_at is None else when(one.next_at).encode()
        code = 1 if verdict is OutcomeKind.DONE and one.next_at is not None else _VERDICTS[verdict] + one.failed
        what = (
            code.to_bytes(1, "big"),
            min(max(one.keep_until, 0), NO_DEADLINE).to_bytes(6, "big"),
            (NO_ERROR if one.error is None else len(error)).to_bytes(4, "big"),
            error,
            len(text).to_bytes(1, "big"),
            text,
            packed_id(one.next_id) if code == 1 else b"",
        )
        return [one.key, one.token, b"".join(what)]

    return write
