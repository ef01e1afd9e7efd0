"""How times, tasks and answers are put into words for a person."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Sequence
from datetime import datetime, timedelta

import msgspec

from bide.core.answers import Answer
from bide.core.instants import Millis, as_datetime
from bide.core.records import Record, Result, State, Topic

_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000))

WORDS: dict[Result, str] = {
    Result.CREATED: "created",
    Result.REPLACED: "replaced what was there",
    Result.KEPT: "kept what was there",
    Result.REFUSED: "refused",
    Result.MOVED: "moved",
    Result.UNDER_WAY: "under way: nothing changed",
    Result.CANCELLED: "cancelled",
    Result.CANCELLED_WHILE_LEASED: "cancelled while it was being delivered: no retry follows",
    Result.REDRIVEN: "redriven",
    Result.NOT_FOUND: "not found: never there, or finished and forgotten",
    Result.FINISHED: "finished already",
    Result.STALE_TOKEN: "stale token: it has changed since you looked, so nothing was done",
}


def current_millis() -> Millis:
    return time.time_ns() // 1_000_000


def length_words(millis: Millis) -> str:
    """The two largest units of a length: "14m 3s", "2d 4h", "4.2s"; a person needs no more."""
    millis = abs(millis)
    if millis < 1_000:
        return f"{millis}ms"
    if millis < 10_000:
        return f"{millis // 100 / 10:g}s"
    millis += 500  # to the nearest second: what was asked for in 15m is not "in 14m 59s"
    parts: list[tuple[int, str]] = []
    for unit, size in _UNITS:
        count, millis = divmod(millis, size)
        if count or parts:
            parts.append((count, unit))
        if len(parts) == 2:
            break
    return " ".join(f"{count}{unit}" for count, unit in parts if count)


def relative_words(at: Millis, now: Millis) -> str:
    """ "in 14m 3s", "3s ago", "now"."""
    if abs(at - now) < 50:
        return "now"
    return f"in {length_words(at - now)}" if at > now else f"{length_words(now - at)} ago"


def local_words(at: Millis) -> str:
    """The local date and time, with its zone."""
    return _local(at).strftime("%Y-%m-%d %H:%M:%S %Z")


def moment_words(at: Millis, now: Millis) -> str:
    """Both: "in 14m 3s (2030-01-31 08:00:00 CET)"."""
    return f"{relative_words(at, now)} ({local_words(at)})"


def state_words(record: Record, now: Millis) -> str:
    """The state; of what waits, whether it is due; of what is leased, whether its holder is lost."""
    if record.state is State.WAITING and record.wake_at <= now:
        return "due"
    if record.state is State.LEASED and record.wake_at <= now:
        return "leased, lost"
    return record.state.value


def answer_words(answer: Answer, topic: str, key: str, *, paused: Container[Topic] = ()) -> str:
    """One line: what happened, to which task, and when it is due now; of a topic that is `paused`, that it waits."""
    words, record, now = WORDS[answer.result], answer.record, current_millis()
    if record is None:
        return f"{topic}/{key}: {words}"
    line = f"{record.topic}/{record.key}: {words}"
    if answer.result is Result.FINISHED:
        return f"{line}, {record.state.value}" + (
            "" if record.finished_at is None else f" {relative_words(record.finished_at, now)}"
        )
    if answer.result is Result.REFUSED and record.deadline is not None:
        line += f", its deadline is {moment_words(record.deadline, now)}"
    if answer.past is not None and answer.past >= timedelta(seconds=1):
        line += f", due {moment_words(record.due_at, now)}, so now"
    elif record.state is State.WAITING:
        line += f", due {moment_words(record.wake_at, now)}"
    elif record.state is State.LEASED:
        line += f", being delivered by {record.holder}"
    if answer.was is not None and answer.was != record.wake_at:
        line += f"; before: {moment_words(answer.was, now)}"
    if record.topic in paused and record.state.live:
        line += f"; the topic is paused, so it waits for: bide resume {record.topic}"
    return line


def summary_words(answers: Sequence[Answer]) -> str:
    """ "moved 3, under_way 1"."""
    counts = Counter(answer.result for answer in answers)
    return ", ".join(f"{result.value} {count:,}" for result, count in counts.most_common())


def printable(text: str) -> str:
    """`text` without what a terminal would obey: a payload or an error may hold anything."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def _local(at: Millis) -> datetime:
    moment = as_datetime(at)
    try:
        return moment.astimezone()
    except (OverflowError, OSError, ValueError):  # year 9999 east of Greenwich
        return moment


def pretty_payload(payload: bytes) -> str | None:
    """The payload as indented JSON; None when it is not JSON."""
    try:
        msgspec.json.decode(payload)
        return msgspec.json.format(payload, indent=2).decode()
    except (ValueError, RecursionError):
        return None
