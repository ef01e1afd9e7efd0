"""Dead tasks by topic and error class. Errors that differ only in numbers, names and addresses share a class.

A class is the first line of an error without the parts that vary from task to task. It keeps the parts by which
engineers distinguish errors: the words, and numbers that are names (an HTTP status, an errno).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from bide.core.instants import Millis
from bide.core.names import error_parts
from bide.core.records import Count, Filter, Found, Page, Record, State, Topic
from bide.engine.client import Client
from bide.engine.verbs import Pages

MOST_LOOKED_AT = 5_000
"""The most dead tasks that one query reads, over all topics."""
_MOST_BYTES = 16 * 2**20
"""The target bytes of their payloads and errors, which are read too."""
_PATIENCE = 0.8
"""Seconds for which one query may read."""
NO_ERROR = "(no error text)"
"""The class of tasks that died without an error text."""
_LONGEST = 160
_READ = 2_000

_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")
_NAMED = r"(?:HTTP(?:/\d\.\d)?|status(?:[ _]code)?|answered|errno|code)[ :=]*(?:with )?"
_PARTS = re.compile(
    r"(?P<url>\b[a-z][a-z0-9+.\-]{1,20}://[^\s'\"<>]+)"
    r"|(?P<mail>[\w.+\-]+@[\w\-]+(?:\.[\w\-]+)+)"
    r"|(?P<uuid>\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b)"
    r"|(?P<quoted>(?<!\w)'[^']*'(?!\w)|\"[^\"]*\"|`[^`]*`|“[^”]*”)"
    r"|(?P<ip>\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|\[[0-9a-f:.]*:[0-9a-f:.]*\](?::\d+)?)"
    rf"|(?P<name>\b{_NAMED}-?\d{{1,3}}\b(?!\.?\d))"
    r"|(?P<hex>\b0x[0-9a-f]+\b|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b)"
    r"|(?P<number>\d+(?:[.,:_]\d+)*)",
    re.IGNORECASE | re.ASCII,
)
_SHOWN = {"url": "(address)", "mail": "(address)", "ip": "(address)", "quoted": "'…'"}


def error_class(error: str | None) -> str:
    """The class of an error. O(length), of 2,000 characters at most.

    >>> error_class("KeyError: 'order-4711' at 0x7f21\\nTraceback ...")
    "KeyError: '…' at #"
    >>> error_class("HTTP 503 from https://shop.example/pay/17 after 3.2 s")
    'HTTP 503 from (address) after # s'
    """
    line = _UNSHOWN.sub(" ", _first_line(error)).strip()
    shown = _PARTS.sub(lambda part: part[0] if part["name"] else _SHOWN.get(part.lastgroup or "", "#"), line)
    line = " ".join(shown.split())
    return line[:_LONGEST].strip() or NO_ERROR


def _first_line(error: str | None) -> str:
    lines = error_parts(error)[0][:_READ].strip().splitlines()
    return lines[0] if lines else ""


class DeadGroup(NamedTuple):
    """The dead tasks of one topic and one error class, among those that were read."""

    topic: Topic
    error: str
    number: int
    """Their number, among those that were read."""
    oldest: Millis
    """When the first of them died."""
    newest: Millis
    example: Record
    """The one that died last, without its payload and traceback."""

    @property
    def first_line(self) -> str:
        """The unchanged first line of the example's error."""
        return _first_line(self.example.error)


class DeadLetters(NamedTuple):
    """All dead tasks, by topic and error."""

    groups: tuple[DeadGroup, ...]
    """Largest first."""
    totals: Mapping[Topic, Count]
    """The number of dead tasks by topic, even if not all were read."""
    partly: frozenset[Topic]
    """Topics whose oldest tasks alone were read."""


async def dead_letters(client: Client, *, most: int = MOST_LOOKED_AT) -> DeadLetters:
    """Read up to `most` dead tasks, the oldest of each topic, and group them. Raises StoreError.

    Topics get equal shares, and the rest of a topic's share goes to the others. O(most).
    """
    tally = await client.tally()
    totals = {topic: count for (topic, state), count in tally.counts.items() if state is State.DEAD and count.number}
    groups: dict[tuple[Topic, str], DeadGroup] = {}
    partly: set[Topic] = set()
    until = asyncio.get_running_loop().time() + _PATIENCE
    left, room = most, _MOST_BYTES
    waiting = sorted(totals, key=lambda topic: (totals[topic].number, topic))
    for place, topic in enumerate(waiting):  # those with few first; the others get the rest
        share, bytes_share = left // (len(waiting) - place), room // (len(waiting) - place)
        pages, number, size = Pages(Filter(topic=topic, state=State.DEAD)), 0, 0
        while number < share and not pages.over:
            page = await pages.read(client, share - number)
            for record in page:
                _group(groups, record)
                size += len(record.payload) + len(record.options) + len(record.error or "")
            number += len(page)
            if size >= bytes_share or asyncio.get_running_loop().time() >= until:
                break
        left, room = left - number, room - size
        if number < totals[topic].number or not totals[topic].exact:
            partly.add(topic)
    ordered = sorted(groups.values(), key=lambda group: (-group.number, group.topic, group.error))
    return DeadLetters(tuple(ordered), totals, frozenset(partly))


def _group(groups: dict[tuple[Topic, str], DeadGroup], record: Record) -> None:
    error = error_class(record.error)
    at = record.finished_at or 0
    old = groups.get((record.topic, error))
    if old is not None and at < old.newest:
        groups[record.topic, error] = old._replace(number=old.number + 1, oldest=min(old.oldest, at))
        return
    said = None if record.error is None else error_parts(record.error)[0]
    example = msgspec.structs.replace(record, payload=b"", options=b"", error=said)
    number, oldest = (1, at) if old is None else (old.number + 1, old.oldest)
    groups[record.topic, error] = DeadGroup(record.topic, error, number, oldest, at, example)


async def tasks_of_group(
    client: Client, topic: Topic, error: str | None, cursor: str | None, *, limit: int = 100
) -> Found:
    """The dead tasks of a topic with this error class, oldest first; None: any class.

    Reads up to 5,000 tasks of the topic; a page may be short or empty and still have a cursor. Raises BadInput for a
    foreign cursor.
    """
    where = Filter(topic=topic, state=State.DEAD)
    until = asyncio.get_running_loop().time() + _PATIENCE
    shown: list[Record] = []
    looked = 0
    while True:
        found = await client.find_page(where, Page(limit=limit, cursor=cursor))
        shown += [one for one in found.tasks if error is None or error_class(one.error) == error]
        looked += len(found.tasks)
        cursor = found.cursor
        enough = len(shown) >= limit or looked >= MOST_LOOKED_AT or asyncio.get_running_loop().time() >= until
        if cursor is None or enough:
            return Found(shown, cursor)
