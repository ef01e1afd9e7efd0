"""What an error of the server, or of the way to it, means for the call that met it.

NotSent       nothing was sent: trying again is safe
Lost          it was sent, and the answer did not come: only a repeat by its number tells
(a reply)     the server refused it, so it was not done: by its first word, wait, ask elsewhere, or give up
"""

from __future__ import annotations

import re

from redis.exceptions import AskError, ResponseError

from bide.core.errors import StoreCorrupt, StoreError, StoreFull, StoreUnavailable

WAIT = frozenset({"TRYAGAIN", "LOADING", "BUSY", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "UNBLOCKED", "MISCONF"})
"""Not done, and it passes: ask the same server again in a moment."""
ELSEWHERE = frozenset({"MOVED", "READONLY", "CLUSTERDOWN", "MASTERDOWN"})
"""Not done, and another server may be the one to ask: look again which."""


_STUMBLED = re.compile(
    r"user_script:[0-9]+: (?:attempt to|bad argument|Missing bytes)|is not (?:an integer|a valid float)"
)
"""Of a script that found what it did not write. It would stumble again: trying again is no way out."""


class NotSent(Exception):
    """There is no connection; the call never left."""


class Lost(Exception):
    """The connection broke, or nothing came in time, after the call was sent."""


class FewHaveIt(Exception):
    """It was done, and fewer replicas have it than were asked for: asking again waits for them again."""


def word_of(reply: ResponseError) -> str:
    """The first word of an error reply, which is its kind; of some, redis-py has made a class instead."""
    kind = type(reply).__name__
    known = {
        "NoScriptError": "NOSCRIPT", "BusyLoadingError": "LOADING", "ReadOnlyError": "READONLY",
        "OutOfMemoryError": "OOM", "MovedError": "MOVED", "AskError": "ASK", "TryAgainError": "TRYAGAIN",
        "ClusterDownError": "CLUSTERDOWN", "MasterDownError": "MASTERDOWN", "NoPermissionError": "NOPERM",
    }.get(kind)  # fmt: skip
    return known or str(reply).partition(" ")[0]


def where_to_ask(reply: ResponseError) -> tuple[str, int] | None:
    """The server that ASK or MOVED names; None for any other reply. Before version 7 redis-py leaves them as text."""
    if word_of(reply) not in ("ASK", "MOVED"):
        return None
    host, _, port = str(reply).rpartition(" ")[2].rpartition(":")
    return (reply.host, reply.port) if isinstance(reply, AskError) else (host, int(port))


def refusal(reply: ResponseError, where: str) -> StoreError:
    """The error for a caller whose call the server has refused for good."""
    word, text = word_of(reply), str(reply)
    if word == "OOM" or "used memory > 'maxmemory'" in text:
        return StoreFull(f"{where}: the server has reached its maxmemory: {text}")
    if "WRONGTYPE" in text or "Bad data format" in text or _STUMBLED.search(text):
        return StoreCorrupt(f"{where}: a key of bide's holds something else: {text}")
    if word in ("NOPERM", "NOAUTH", "WRONGPASS"):
        return StoreUnavailable(f"{where}: this user may not: {text} (docs/redis.md lists the rights that bide needs)")
    return StoreUnavailable(f"{where}: {text}")


def said(error: BaseException) -> str:
    """What an error says, or what it is if it says nothing; redis-py leaves the word out of a redirection."""
    return f"{word_of(error)} {error}" if isinstance(error, AskError) else str(error) or type(error).__name__
