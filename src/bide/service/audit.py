"""The audit log: one structured line for every change by a caller, and a limited number for refusals.

Lines go to the logger `bide.audit`: changes at INFO, refusals at WARNING. A line has its parts as extra fields (`who`,
`verb`, `topic`, `key`, `id`, `was`, `wake_at`, `answer`) for a formatter that writes JSON. Names cannot hold control
characters, so no caller can forge a line.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from bide.core.answers import Answer
from bide.core.instants import instant_text
from bide.core.records import Result, Topic
from bide.service.authz import AccessRefused, Forbidden

_log = logging.getLogger("bide.audit")
_CHANGED = frozenset({Result.REPLACED, Result.MOVED, Result.CANCELLED, Result.CANCELLED_WHILE_LEASED, Result.REDRIVEN})


def audit(verb: str, answers: Sequence[Answer], who: str) -> None:
    """Write a line for each task that `verb` changed, and one line for all that it created. For `acting_as`.

    Answers that mean no change (`under_way`, `not_found`, `kept`, ...) get no line.
    """
    if not _log.isEnabledFor(logging.INFO):
        return
    created = [answer.record for answer in answers if answer.result is Result.CREATED and answer.record is not None]
    noted = _CHANGED if len(created) > 1 else _CHANGED | {Result.CREATED}
    for answer in answers:
        record = answer.record
        if record is not None and answer.result in noted:
            _log.info(
                "%s: %s %s/%s: %s", who, verb, record.topic, record.key, answer.result.value,
                extra={
                    "who": who, "verb": verb, "topic": record.topic, "key": record.key, "id": record.id,
                    "was": None if answer.was is None else instant_text(answer.was),
                    "wake_at": instant_text(record.wake_at) if record.state.live else None,
                    "answer": answer.result.value,
                },
            )  # fmt: skip
    if len(created) > 1:
        topics = dict(Counter(record.topic for record in created))
        _log.info(
            "%s: %s %d tasks of %s: created", who, verb, len(created), ", ".join(topics),
            extra={
                "who": who, "verb": verb, "count": len(created), "topics": topics, "answer": Result.CREATED.value,
            },
        )  # fmt: skip


def audit_pause(who: str, verb: str, topic: Topic, answer: str) -> None:
    """Write a line for a pause or a resume of a topic."""
    _log.info(
        "%s: %s %s: %s", who, verb, topic, answer,
        extra={"who": who, "verb": verb, "topic": topic, "key": None, "answer": answer},
    )  # fmt: skip


def audit_unknown(who: str, verb: str, topic: str | None = None, key: str | None = None) -> None:
    """Write a line for a change whose answer was lost (OutcomeUnknown): it may have been done."""
    _log.warning(
        "%s: %s %s: the outcome is unknown", who, verb, "many" if key is None else f"{topic}/{key}",
        extra={"who": who, "verb": verb, "topic": topic, "key": key, "answer": "unknown"},
    )  # fmt: skip


class Refusals:
    """Log lines for refusals, limited so that refused callers cannot fill a disk.

    From one peer under one name: a burst of ten, then one every ten seconds. In all: a burst of a hundred, then one a
    second, 86,400 lines a day. The next line that is written says how many were left out.
    """

    OF_ONE = (10, 0.1)
    """The burst, and the lines a second after it, from one peer under one name."""
    IN_ALL = (100, 1.0)
    MOST_PEERS = 1_000
    """The number of tracked peers; the one that has been quiet for longest is dropped first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._all = TokenBucket(*self.IN_ALL, clock())
        self._peers: OrderedDict[tuple[str, str], TokenBucket] = OrderedDict()
        self._left_out = 0

    def note(self, error: AccessRefused, peer: str) -> None:
        """Log that a caller at `peer` (an address) was refused, within the limits."""
        now = self._clock()
        who = error.who if isinstance(error, Forbidden) else ""
        place = (network_of(peer), who)
        bucket = self._peers.get(place)
        if bucket is None:
            bucket = self._peers[place] = TokenBucket(*self.OF_ONE, now)
            if len(self._peers) > self.MOST_PEERS:
                self._peers.popitem(last=False)
        else:
            self._peers.move_to_end(place)
        if not bucket.take(now) or not self._all.take(now):
            self._left_out += 1
            return
        left_out, self._left_out = self._left_out, 0
        _log.warning(
            "refused %s: %s%s", peer, error.detail, f" ({left_out} more were not logged)" if left_out else "",
            extra={
                "who": who or None, "peer": peer, "answer": error.title.lower(), "left_out": left_out,
                "verb": error.verb.value if isinstance(error, Forbidden) else None,
                "topic": error.topic if isinstance(error, Forbidden) else None,
            },
        )  # fmt: skip


class TokenBucket:
    """A token bucket: holds at most `most` tokens, and gains `rate` a second."""

    __slots__ = ("_at", "_left", "_most", "_rate")

    def __init__(self, most: float, rate: float, now: float) -> None:
        self._most = most
        self._rate = rate
        self._left = float(most)
        self._at = now

    def take(self, now: float, wanted: int = 1) -> int:
        """Take up to `wanted` tokens, and return how many there were."""
        self._left = min(self._most, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        taken = min(wanted, int(self._left))
        self._left -= taken
        return taken


class EventQuota:
    """Limits the number of events of each caller, since the event log holds some 10,000 in total."""

    MOST, A_SECOND = 2_000, 20.0

    def __init__(self) -> None:
        self._all: dict[str, TokenBucket] = {}

    def take(self, who: str, wanted: int = 1) -> int:
        """The number of the `wanted` events that the caller may write now."""
        now = time.monotonic()
        return self._all.setdefault(who, TokenBucket(self.MOST, self.A_SECOND, now)).take(now, wanted)


def network_of(peer: str) -> str:
    """The network that belongs to one party: a single IPv4 address, or an IPv6 /64."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped) if mapped else str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


audit_refused = Refusals().note
"""One for the process, like the logger."""
