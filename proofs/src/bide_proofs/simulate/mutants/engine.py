"""Mutants of the engine: of workers and clients."""

from __future__ import annotations

from bide.engine import capacity, groups, verdicts
from bide.engine.batcher import Batcher
from bide.engine.client import Client
from bide.engine.keeper import Keeper
from bide.engine.lanes import Lanes
from bide.engine.leasing import LeaseLoop
from bide.engine.session import Session
from bide.engine.settler import _Outbox
from bide.engine.terms import Retention
from bide.engine.waker import Waker
from bide.engine.worker import Worker
from bide_proofs.simulate.mutants.mutant import Mutant

OF_THE_ENGINE = (
    Mutant(
        "settled-before-it-is-delivered", "P2", "A delivery is settled as done when its handler begins.",
        Lanes._run, "        ended = await self._deliver(delivery)",
        "        self._ended(delivery, None)\n        delivery.over = True\n"
        "        ended = await self._deliver(delivery)",
    ),
    Mutant(
        "dead-at-the-first-loss", "P2", "A task whose holder died once is dead.",
        verdicts.unfit, "record.losses >= route.losses", "record.losses",
    ),
    Mutant(
        "drain-settles-what-it-cancels", "P2", "A handler that a worker cancels as it ends counts as done.",
        Worker._ended, "self._settler.put(delivery, given_back(delivery.record))",
        "self._settler.put(delivery, settlement(\n"
        "                record, None, self._lanes[record.topic].route,\n"
        "                self.terms.retention_of(record.topic), self.clock))",
    ),
    Mutant(
        "unstarted-is-given-back-as-done", "P2", "What no handler has seen is settled as done when its worker ends.",
        verdicts.given_back, "Verdict.DEFER, In(0)", "Verdict.DONE",
    ),
    Mutant(
        "one-error-ends-the-leasing", "P2", "A worker whose store was away once leases no more.",
        LeaseLoop._lease_for_ever, "continue", "return",
    ),
    Mutant(
        "outcome-given-up-when-the-store-is-away", "P2", "An outcome that the store does not take at once is given up.",
        _Outbox._send, "if self._closing:", "if pause:",
    ),
    Mutant(
        "only-exceptions-end-a-delivery", "P2", "What a handler raises counts if it is an Exception.",
        Lanes._run, "except BaseException as raised:", "except Exception as raised:",
    ),
    Mutant(
        "an-error-speaks-for-itself", "P2", "The text of an error is what it says, if it can say it.",
        verdicts.settlement, "error_text(ended)", "f'{type(ended).__name__}: {ended}'",
    ),
    Mutant(
        "group-verb-goes-by-the-key", "P5", "A task that has left the group is changed all the same.",
        groups.over_group, " and one.group == where.group", "",
    ),
    Mutant(
        "leases-before-it-settles", "P3", "A worker that stood still leases before it has settled what has ended.",
        Keeper._settled, "if settler.behind(by):", "if False:",
    ),
    Mutant(
        "delivers-after-a-standstill", "P3", "A delivery begins though its lease has run out meanwhile.",
        Lanes._lane, "if delivery.over or now >= delivery.expires:", "if delivery.over:",
    ),
    Mutant(
        "lease-counts-from-its-answer", "P3", "A worker counts its lease from the answer, not from before it asked.",
        Worker._deliver, "Delivery(record, self, expires, leased.now)",
        "Delivery(record, self, asyncio.get_running_loop().time() + self.terms.lease / 1000, leased.now)",
    ),
    Mutant(
        "keeper-never-extends", "P3", "The leases of handlers that run are not extended.",
        Keeper.extend, "await self._keep(held, expires)", "pass",
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
        verdicts.unfit, "now > record.deadline", "now < 0",
    ),
    Mutant(
        "batch-forgets-who-came-meanwhile", "P4", "What is asked while a batch is under way waits for another call.",
        Batcher._ended, "if self._asked:", "if False:",
    ),
    Mutant(
        "one-lane-per-topic", "P6", "The deliveries of a topic wait for each other.",
        Lanes._wake_one, "len(self._lanes) < self.route.concurrency", "not self._lanes",
    ),
    Mutant(
        "leases-when-all-is-done", "P6", "A worker waits for its handlers before it leases again.",
        Worker._deliver, "lanes.start(fit)", "lanes.start(fit)\n        await lanes.idle(None)",
    ),
    Mutant(
        "a-free-slot-tells-nobody", "P6", "A worker whose slot is free again does not look for what waited for it.",
        Worker._freed, "if lanes.hungry or self._short or self._emptied:", "if self._short or self._emptied:",
    ),
    Mutant(
        "prefetch", "P7", "A worker asks for as many as it may run, also of what it runs already.",
        capacity._share, "more = min(part, left, rooms[topic].free - has)", "more = part",
    ),
    Mutant(
        "never-listens", "P8", "A worker does not subscribe to wake-ups.",
        Worker.start, "if isinstance(self.store, Notifies):", "if not isinstance(self.store, Notifies):",
    ),
    Mutant(
        "forgets-after-the-lease", "P8", "What was heard while a lease was under way is forgotten.",
        LeaseLoop._lease_for_ever, "await self._waker.sleep(wake)",
        "self._waker.forget()\n        await self._waker.sleep(wake)",
    ),
    Mutant(
        "hears-only-of-later", "P8", "A wake-up counts if it is later than the one before.",
        Waker.hear, "if self._heard is None or wake < self._heard:", "if self._heard is None or wake > self._heard:",
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
        Worker._wanted, "return asked", "return {one: asked.get(one, 0) for one in self._lanes}", minutes=1,
    ),
    Mutant(
        "nothing-is-purged", "P10", "Purging asks for no tasks at all.",
        Keeper.purge, "limit=PAGE", "limit=0",
    ),
    Mutant(
        "kept-a-thousand-times-as-long", "P10", "Retention is taken for seconds.",
        Retention.keep_until, "now + length", "now + length * 1000",
    ),
)  # fmt: skip
