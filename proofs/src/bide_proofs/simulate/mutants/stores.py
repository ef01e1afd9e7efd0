"""Mutants of where tasks rest: the store in memory, and what every store on a server owes besides."""

from __future__ import annotations

from bide.stores.batches import gathered
from bide.stores.memory import MemoryStore
from bide.stores.memory.lines import Line, TopicTasks
from bide.stores.memory.listings import Listings
from bide_proofs.simulate import link
from bide_proofs.simulate.link import Link
from bide_proofs.simulate.mutants.mutant import Mutant
from bide_proofs.simulate.server import Server, Shard

OF_STORES = (
    Mutant(
        "token-not-checked-at-settle", "P3", "An outcome is accepted for whatever is leased, by any token.",
        MemoryStore.settle, "not lifecycle.holds(old, asked.token)", "old.state is not _LEASED",
    ),
    Mutant(
        "token-not-checked-at-extend", "P3", "A lease is extended for whoever asks, with any token.",
        MemoryStore._extend, "not lifecycle.holds(old, lease.token)", "old.state is not _LEASED",
    ),
    Mutant(
        "cancel-spares-what-is-leased", "P4", "Cancelling a leased task answers so, and leaves its lease as it was.",
        MemoryStore.change, "record is old:", "record is old or old.state is _LEASED:",
    ),
    Mutant(
        "an-old-entry-still-counts", "P5", "What stands in line is given out though the task has changed since.",
        Line.front, "if held(first.key) is first:", "if held(first.key) is not None:",
    ),
    Mutant(
        "lost-leases-stay-lost", "P2", "What is leased does not stand in line for when its lease ends.",
        TopicTasks.place, "self.held.push(record)", "pass",
    ),
    Mutant(
        "purge-takes-what-lives-again", "P2", "What is forgotten is not checked to be what had ended.",
        MemoryStore.purge, "record is None or record.token != token", "record is None",
    ),
    Mutant(
        "purge-takes-nothing", "P10", "Purging begins with what is to be kept, not with what has passed.",
        MemoryStore.purge, "self._ended[0][0] <= now", "self._ended[0][0] > now",
    ),
    Mutant(
        "ended-is-never-noted", "P10", "A key that had been remembered before is not noted for purging a second time.",
        MemoryStore._end, "heappush(self._ended, (ended.keep_until, ended.token, ended.topic, ended.key))",
        "self._ended or heappush(self._ended, (ended.keep_until, ended.token, ended.topic, ended.key))",
    ),
    Mutant(
        "forgotten-at-once", "P4", "What has ended is forgotten as it ends, whatever its retention.",
        MemoryStore._end, "ended.keep_until <= now", "ended.keep_until > now",
    ),
    Mutant(
        "listing-entry-left", "P10", "A task that is gone stays in the listings.",
        Listings.note, "if before is not None:", "if before is not None and after is not None:",
    ),
    Mutant(
        "wake-of-topics-that-nobody-asked-for", "P11", "The next wake is that of all topics, asked for or not.",
        MemoryStore.lease, "return Leased(taken, next_wake, now)",
        "wakes = [wake for topic in self._topics.values() if (wake := topic.next_wake()) is not None]\n"
        "    return Leased(taken, min(wakes, default=None), now)",
        minutes=0.5,
    ),
    Mutant(
        "tells-of-the-latest", "P8", "Of several new tasks the wake of the last is told, and not of the first.",
        MemoryStore._tell, "record.wake_at < earliest.get(record.topic, record.wake_at + 1)",
        "record.wake_at > earliest.get(record.topic, record.wake_at - 1)",
    ),
    Mutant(
        "leases-by-the-workers-clock", "P1", "What is due is decided by the worker's clock, not by the earlier one.",
        link._lease, "min(now, there)", "now",
    ),
    Mutant(
        "a-resent-call-is-done-again", "P5", "An answer that was lost is not repeated: the call is done once more.",
        Server.handle, "number <= last.number", "number < last.number",
    ),
    Mutant(
        "an-older-call-is-done", "P5", "A call that arrives after a later one of its caller is done all the same.",
        Server.handle, "number <= last.number", "number == last.number",
    ),
    Mutant(
        "answers-lost-at-restart", "P5", "A server that restarts has forgotten what it has answered.",
        Shard.stop, "self.life += 1", "self.life += 1\n    self.kept.clear()",
    ),
    Mutant(
        "newest-write-lost-at-restart", "P2", "A server that restarts has lost the last thing that it has answered.",
        Shard.stop, "self.life += 1",
        "self.life += 1\n"
        "    newest = max(self.store._everything(), key=lambda record: record.token, default=None)\n"
        "    if newest is not None:\n"
        "        self.store._forget(self.store._topics[newest.topic], newest)",
    ),
    Mutant(
        "unknown-is-told-as-not-done", "P4", "A call that may have been done is said not to have been done.",
        Link._insist, "return OutcomeUnknown(", "return StoreUnavailable(",
    ),
    Mutant(
        "partly-failed-is-told-as-failed", "P4", "A batch of which one shard failed is said to have failed as a whole.",
        gathered, "raise PartlyFailed(answers)", "raise failed[0]",
    ),
    Mutant(
        "answers-in-another-order", "P4", "The answers of a shard are dealt out in the reverse order.",
        Link._parted, "zip(mine, told, strict=True)", "zip(reversed(mine), told, strict=True)",
    ),
    Mutant(
        "full-store-refuses-settle", "P9", "Where there is no room for new work, outcomes are refused as well.",
        Link.settle, "lambda store, mine, there: store.settle(mine, now=there)",
        "lambda store, mine, there: (_ for _ in ()).throw(StoreFull('no room')) if self._full()"
        " else store.settle(mine, now=there)",
    ),
    Mutant(
        "full-store-refuses-cancel", "P9", "Where there is no room for new work, changes are refused as well.",
        Link.change, "lambda store, mine, there: store.change(mine, now=there)",
        "lambda store, mine, there: (_ for _ in ()).throw(StoreFull('no room')) if self._full()"
        " else store.change(mine, now=there)",
    ),
)  # fmt: skip
