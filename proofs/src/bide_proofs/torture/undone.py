"""Leases that a crash of the server may have undone: what a store says that it does not keep is no broken promise.

PostgreSQL commits leases without waiting for the disk or for a standby, and Redis answers before its replicas have
heard (docs/sql.md and docs/redis.md, "What survives what"). After a crash, or a failover, such a task is as it was
before its newest lease, or the extension of one. To the checker, which knows of no such thing, that looks like two live
leases, or like something shown that was over.

So a breach of what a lease stands for is put aside if the same task was leased, or its lease extended, within ten
seconds before such a trouble, or during it. That is all: what is lost, early or left behind, and tokens that do not
rise, are put aside for no trouble. Of the counting of attempts only that is which a lease alone would explain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from bide.testing.history import events as ev
from bide.testing.history.events import Event
from bide.testing.history.report import Violation

UNDONE_BY: Mapping[str, Collection[str]] = {
    "postgres": ("kill -9 of the server", "OOM", "failover", "server restart", "disk full"),
    "redis-sentinel": ("kill -9 of the server", "SIGSTOP of the server", "hand-over", "failover"),
    "redis-cluster": ("kill -9 of the server", "SIGSTOP of the server", "hand-over", "failover"),
}
"""By name of a server: the troubles after which its newest leases may be gone."""
_PROMISES = ("P3", "P4", "P5")
_UNCOUNTED = "leased as attempt "
"""How a breach of P12 begins where a lease that was undone is not counted in the next."""
_BEFORE = 10_000_000_000
"""Nanoseconds: of what is committed without waiting, more than this is not under way. A quiet machine writes it within
half a second; on a busy one who writes gets its turn seconds later."""

Span = tuple[str, int, int]
"""A trouble, and from when to when it lasted, in nanoseconds of the monotonic clock."""


def undone(
    name: str, violations: Sequence[Violation], events: Iterable[Event], spans: Sequence[Span]
) -> list[Violation]:
    """Those of `violations` that leases undone by a crash of the server called `name` account for."""
    kinds = UNDONE_BY.get(name, ())
    windows = [(begun - _BEFORE, over) for kind, begun, over in spans if kind in kinds]
    if not windows:
        return []
    suspects = {(one.topic, one.key) for one in violations if _of_a_lease(one)}
    held = _held(events, suspects)
    return [
        one
        for one in violations
        if _of_a_lease(one)
        and any(begun <= at <= over and _goes_on(one, at) for begun, over in windows for at in held[one.topic, one.key])
    ]


def _of_a_lease(violation: Violation) -> bool:
    """True if a lease that was undone can look like this."""
    return violation.promise in _PROMISES or (violation.promise == "P12" and violation.what.startswith(_UNCOUNTED))


def _goes_on(violation: Violation, at: int) -> bool:
    """True if one of its events came after that instant."""
    return any(event.at > at for event in violation.events)


def _held(events: Iterable[Event], suspects: Collection[tuple[str, str]]) -> dict[tuple[str, str], list[int]]:
    """When each of these was said to be leased, or its lease to be extended."""
    held: dict[tuple[str, str], list[int]] = defaultdict(list)
    extending: dict[int, tuple[str, str]] = {}
    for event in events:
        if isinstance(event, ev.Leased):
            for one in event.tasks:
                if (one.topic, one.key) in suspects:
                    held[one.topic, one.key].append(event.at)
        elif isinstance(event, ev.Extending):
            if (event.topic, event.key) in suspects:
                extending[event.call] = (event.topic, event.key)
        elif isinstance(event, ev.Told) and event.call in extending:
            ref = extending.pop(event.call)
            if event.ok:
                held[ref].append(event.at)
    return held
