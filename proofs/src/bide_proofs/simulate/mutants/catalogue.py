"""A mutant: a few words of one function's source exchanged, in the running program, and put back afterwards.

So a mutant *is* its change, and can be read as one: `old` is what the function says, `new` what somebody might have
written by mistake. Its source is compiled anew and its code object takes the place of the function's own, so that
whoever has imported the function, or holds a bound method of it, runs the mutant too.

Mutants of the engine: of workers and clients.

Mutants of the lifecycle: of what a verb makes of a task.

Mutants of where tasks rest: the store in memory, and what every store on a server owes besides.
"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from msgspec import Struct

from bide.core.errors import BadInput
from bide.core.lifecycle import change, extend, lease, may_lease, next_token, schedule, settle
from bide.engine import verbs
from bide.engine.batcher import Batcher
from bide.engine.client import Client
from bide.engine.config import Retention
from bide.engine.delivery import executor, settlement
from bide.engine.delivery.executor import TopicExecutor
from bide.engine.delivery.lease_extender import LeaseExtender
from bide.engine.delivery.lease_loop import WakeLoop, Waker
from bide.engine.delivery.settler import _Outbox
from bide.engine.delivery.worker import Worker
from bide.engine.session import Session
from bide.stores.batches import gathered
from bide.stores.memory import MemoryStore
from bide.stores.memory.lines import Line, Listings, TopicTasks
from bide_proofs.simulate import link
from bide_proofs.simulate.link import Link
from bide_proofs.simulate.server import Server, Shard

_FLAGS = __future__.annotations.compiler_flag


class Mutant(Struct, frozen=True):
    """One small change that breaks one promise."""

    name: str
    promise: str
    """The one that it breaks: "P1" to "P12"."""
    says: str
    """The change and its place, in one sentence."""
    of: Callable[..., Any]
    old: str
    """In the source of `of`, exactly once."""
    new: str
    minutes: float = 6
    """Of virtual time that a play lasts: less for those that cost much of the real."""

    @property
    def where(self) -> str:
        """The function's full name."""
        return f"{self.of.__module__}.{self.of.__qualname__}"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The program with this change, as long as it lasts. Raises BadInput where `old` is not once in the source."""
        code, function = self.code(), _function(self)
        before = function.__code__
        function.__code__ = code
        try:
            yield
        finally:
            function.__code__ = before

    def code(self) -> CodeType:
        """The replacement of the function: compiled once, so that a file may be edited while mutants are played."""
        return _changed(self)


def _function(mutant: Mutant) -> FunctionType:
    assert isinstance(mutant.of, FunctionType), f"{mutant.name}: only what is written in Python can be changed"
    return mutant.of


@cache
def _changed(mutant: Mutant) -> CodeType:
    function = _function(mutant)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutant.old) != 1:
        raise BadInput(
            f"{mutant.name}: old",
            mutant.old,
            f"what {mutant.where} says once; it is there {source.count(mutant.old)} times",
        )
    module = compile(source.replace(mutant.old, mutant.new), function.__code__.co_filename, "exec", _FLAGS, True)
    [code] = [const for const in module.co_consts if isinstance(const, CodeType) and const.co_name == function.__name__]
    if code.co_freevars != function.__code__.co_freevars:
        raise BadInput(f"{mutant.name}: of", mutant.where, "a function that uses nothing of one around it")
    return code.replace(co_firstlineno=function.__code__.co_firstlineno, co_qualname=function.__code__.co_qualname)


OF_THE_ENGINE = (
    Mutant(
        "settled-before-it-is-delivered", "P2", "A delivery is settled as done when its handler begins.",
        TopicExecutor._run, "        ended = await self._deliver(delivery)",
        "        self._ended(delivery, None)\n        delivery.over = True\n"
        "        ended = await self._deliver(delivery)",
    ),
    Mutant(
        "dead-at-the-first-loss", "P2", "A task whose holder died once is dead.",
        settlement.reject_reason, "record.losses >= route.losses", "record.losses",
    ),
    Mutant(
        "drain-settles-what-it-cancels", "P2", "A handler that a worker cancels as it ends counts as done.",
        Worker._ended, "self._settler.put(delivery, release(delivery.record))",
        "self._settler.put(delivery, settlement_for(\n"
        "                record, None, self._executors[record.topic].route,\n"
        "                self.config.retention_of(record.topic), self.clock))",
    ),
    Mutant(
        "unstarted-is-given-back-as-done", "P2", "What no handler has seen is settled as done when its worker ends.",
        settlement.release, "OutcomeKind.DEFER, In(0)", "OutcomeKind.DONE",
    ),
    Mutant(
        "one-error-ends-the-leasing", "P2", "A worker whose store was away once leases no more.",
        WakeLoop._run, "continue", "return",
    ),
    Mutant(
        "outcome-given-up-when-the-store-is-away", "P2", "An outcome that the store does not take at once is given up.",
        _Outbox._send, "if self._closing:", "if pause:",
    ),
    Mutant(
        "only-exceptions-end-a-delivery", "P2", "What a handler raises counts if it is an Exception.",
        TopicExecutor._run, "except BaseException as raised:", "except Exception as raised:",
    ),
    Mutant(
        "an-error-speaks-for-itself", "P2", "The text of an error is what it says, if it can say it.",
        settlement.settlement_for, "error_text(ended)", "f'{type(ended).__name__}: {ended}'",
    ),
    Mutant(
        "group-verb-goes-by-the-key", "P5", "A task that has left the group is changed all the same.",
        verbs.over_group, " and one.group == where.group", "",
    ),
    Mutant(
        "leases-before-it-settles", "P3", "A worker that stood still leases before it has settled what has ended.",
        LeaseExtender._settled, "if settler.behind(by):", "if False:",
    ),
    Mutant(
        "delivers-after-a-standstill", "P3", "A delivery begins though its lease has run out meanwhile.",
        TopicExecutor._run_queue, "if delivery.over or now >= delivery.expires:", "if delivery.over:",
    ),
    Mutant(
        "lease-counts-from-its-answer", "P3", "A worker counts its lease from the answer, not from before it asked.",
        Worker._deliver, "Delivery(record, self, expires, leased.now)",
        "Delivery(record, self, asyncio.get_running_loop().time() + self.config.lease / 1000, leased.now)",
    ),
    Mutant(
        "keeper-never-extends", "P3", "The leases of handlers that run are not extended.",
        LeaseExtender.extend, "await self._keep(held, expires)", "pass",
    ),
    Mutant(
        "reschedule-is-cancel-and-schedule", "P4", "Rescheduling reads the task, cancels it, and schedules it anew.",
        Session._change, "return await self._send_changes(batch, now=self._clock.now())",
        "answers = []\n"
        "    for one in batch:\n"
        "        [old] = await self.store.get([Ref(one.topic, one.key)])\n"
        "        if type(one) is Move and old is not None and old.state.value == 'waiting' and one.if_token is None:\n"
        "            await self._send_changes([Cancel(one.topic, one.key)], now=self._clock.now())\n"
        "            new = NewTask(old.topic, old.key, old.id, one.due, old.payload, old.group, old.options)\n"
        "            [added] = await self._send_adds([new], now=self._clock.now())\n"
        "            answers.append(Answer(Result.MOVED, added.record, old.wake_at))\n"
        "        else:\n"
        "            answers += await self._send_changes([one], now=self._clock.now())\n"
        "    return answers",
    ),
    Mutant(
        "deadline-not-asked-at-delivery", "P4", "A task is delivered after its deadline.",
        settlement.reject_reason, "now > record.deadline", "now < 0",
    ),
    Mutant(
        "batch-forgets-who-came-meanwhile", "P4", "What is asked while a batch is under way waits for another call.",
        Batcher._ended, "if self._asked:", "if False:",
    ),
    Mutant(
        "one-lane-per-topic", "P6", "The deliveries of a topic wait for each other.",
        TopicExecutor._wake_one, "len(self._runners) < self.route.concurrency", "not self._runners",
    ),
    Mutant(
        "leases-when-all-is-done", "P6", "A worker waits for its handlers before it leases again.",
        Worker._deliver, "executor.start(fit)", "executor.start(fit)\n        await executor.idle(None)",
    ),
    Mutant(
        "a-free-slot-tells-nobody", "P6", "A worker whose slot is free again does not look for what waited for it.",
        Worker._freed, "if executor.backlogged or self._short or self._emptied:",
        "if self._short or self._emptied:",
    ),
    Mutant(
        "prefetch", "P7", "A worker asks for as many as it may run, also of what it runs already.",
        executor._share, "more = min(part, left, topics[topic].free - has)", "more = part",
    ),
    Mutant(
        "never-listens", "P8", "A worker does not subscribe to wake-ups.",
        Worker.start, "if isinstance(self.store, Notifies):", "if not isinstance(self.store, Notifies):",
    ),
    Mutant(
        "forgets-after-the-lease", "P8", "What was heard while a lease was under way is forgotten.",
        WakeLoop._run, "await self._waker.sleep(wake)",
        "self._waker.forget()\n        await self._waker.sleep(wake)",
    ),
    Mutant(
        "hears-only-of-later", "P8", "A wake-up counts if it is later than the one before.",
        Waker.notify, "if self._notified is None or wake < self._notified:",
        "if self._notified is None or wake > self._notified:",
    ),
    Mutant(
        "sleep-has-no-cap", "P8", "A worker sleeps until it hears of something.",
        Waker.sleep, "asked_at) + self._cap", "asked_at) + 3600",
    ),
    Mutant(
        "polls", "P8", "A worker asks its store twenty times a second.",
        Waker.sleep, "asked_at) + self._cap", "asked_at) + 0.05", minutes=0.5,
    ),
    Mutant(
        "sleeps-by-its-own-clock", "P8", "A client goes by its machine's clock though its store has one.",
        Client._begin, "self.clock = (store.clock() if isinstance(store, TellsTime) else None) or self._own_clock",
        "self.clock = self._own_clock", minutes=0.5,
    ),
    Mutant(
        "a-full-topic-spins", "P11", "A topic without room is asked for its next wake, which lies in the past.",
        Worker._free_slots, "return asked", "return {one: asked.get(one, 0) for one in self._executors}", minutes=1,
    ),
    Mutant(
        "nothing-is-purged", "P10", "Purging asks for no tasks at all.",
        LeaseExtender.purge, "limit=PAGE", "limit=0",
    ),
    Mutant(
        "kept-a-thousand-times-as-long", "P10", "Retention is taken for seconds.",
        Retention.keep_until, "now + length", "now + length * 1000",
    ),
)  # fmt: skip


OF_THE_LIFECYCLE = (
    Mutant(
        "leased-before-it-is-due", "P1", "A task may be leased when it is due within 5 ms.",
        may_lease, "old.wake_at <= now", "old.wake_at <= now + 5",
    ),
    Mutant(
        "retry-counts-from-the-due-time", "P1", "The pause before a retry is counted from when the task was due first.",
        settle, "asked.next_at.resolve(now)", "asked.next_at.resolve(old.due_at)",
    ),
    Mutant(
        "move-leaves-the-wake", "P1", "Rescheduling changes the due time, and not the time at which the task wakes.",
        change, "due_at=due_at, wake_at=wake_at,", "due_at=due_at,",
    ),
    Mutant(
        "token-kept-at-lease", "P3", "A lease gets the token that the task had before.",
        lease, "token=token, holder=holder", "holder=holder",
    ),
    Mutant(
        "extend-changes-nothing", "P3", "Extending answers yes and leaves the end of the lease where it was.",
        extend, "wake_at=until", "wake_at=old.wake_at",
    ),
    Mutant(
        "move-touches-what-is-leased", "P3", "Rescheduling a leased task makes it wait again, while it is delivered.",
        change, "if word == Result.UNDER_WAY:", "if word == Result.UNDER_WAY and type(asked) is not Move:",
    ),
    Mutant(
        "redrive-of-what-is-alive", "P4", "Redriving a task that waits or is leased begins a new life as well.",
        change, "if word == Result.UNDER_WAY:", "if word == Result.UNDER_WAY and type(asked) is not Redrive:",
    ),
    Mutant(
        "keep-replaces", "P4", "on_conflict=keep is taken for replace.",
        schedule, "verb = _SCHEDULE[new.on_conflict]",
        "verb = Verb.REPLACE if new.on_conflict is OnConflict.KEEP else _SCHEDULE[new.on_conflict]",
    ),
    Mutant(
        "keep-passes-over-done", "P4", "on_conflict=keep and refuse do not see a task that is done and remembered.",
        schedule, "if word != Result.REPLACED:", "if word != Result.REPLACED and old.state.live:",
    ),
    Mutant(
        "earliest-and-latest-swapped", "P4", "on_conflict=earliest keeps the later of two times, latest the earlier.",
        schedule, "(verb is Verb.EARLIEST and due_at >= old.due_at) or (verb is Verb.LATEST and due_at <= old.due_at)",
        "(verb is Verb.EARLIEST and due_at <= old.due_at) or (verb is Verb.LATEST and due_at >= old.due_at)",
    ),
    Mutant(
        "cancelled-though-leased", "P4", "Cancelling a leased task answers `cancelled`, as if nothing were running.",
        change, "return Answer(Result(word), _ended(", "return Answer(Result.CANCELLED, _ended(",
    ),
    Mutant(
        "deadline-not-asked-by-moves", "P4", "A move past the deadline is not refused.",
        change, "deadline is not None and wake_at > deadline", "deadline is not None and wake_at < 0",
    ),
    Mutant(
        "if-token-not-asked", "P5", "if_token is looked at only if it is from the future.",
        change, "asked.if_token != old.token", "asked.if_token > old.token",
    ),
    Mutant(
        "defer-counts", "P4", "Deferring counts as an attempt.",
        settle, "old.attempt - deferred", "old.attempt",
    ),
    Mutant(
        "losses-not-counted", "P2", "A lease after one that ended unsettled counts no loss.",
        lease, "old.losses + lost", "old.losses",
    ),
    Mutant(
        "attempt-not-counted", "P12", "A delivery after a lost lease has the number of the one before.",
        lease, "old.attempt + 1", "old.attempt + (not lost)",
    ),
    Mutant(
        "retry-begins-a-new-life", "P12", "After a failure a task has another id.",
        settle, "old, state=State.WAITING,", "old, id=f'{token:036d}', state=State.WAITING,",
    ),
    Mutant(
        "again-keeps-the-id", "P12", "The next life that Done(again_in=...) begins has the id of the one before.",
        settle, "_born_again(old, asked.next_id,", "_born_again(old, old.id,",
    ),
    Mutant(
        "redrive-keeps-the-id", "P12", "A redriven task has the id of the life that died.",
        change, "_born_again(old, asked.id,", "_born_again(old, old.id,",
    ),
    Mutant(
        "replace-keeps-the-id", "P12", "A task that replaces another has the id of that.",
        schedule, "return Answer(Result.REPLACED, _born(new, due_at, now, token),",
        "new = NewTask(new.topic, new.key, old.id, new.due, new.payload, new.group, new.options, new.deadline)\n"
        "    return Answer(Result.REPLACED, _born(new, due_at, now, token),",
    ),
    Mutant(
        "token-is-the-time", "P12", "A token is the time in microseconds, and not more than the last one.",
        next_token, "max(last + 1, now * 1000)", "now * 1000",
    ),
    Mutant(
        "token-kept-at-move", "P5", "Rescheduling leaves the token as it was.",
        change, "deadline=deadline, token=token", "deadline=deadline",
    ),
)  # fmt: skip


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
