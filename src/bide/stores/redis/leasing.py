"""Leasing from many shards: asks those where something is due, in rounds, until there is enough."""

from __future__ import annotations

import time as steady
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any

from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.core.records import Leased, Record, State, Token, Topic
from bide.stores.redis.bodies import record_of
from bide.stores.redis.caller import Call, Caller
from bide.stores.redis.heads import CAP, GRACE, Heads, owned
from bide.stores.redis.layout import Layout
from bide.stores.redis.time import ServerTime

_AGAIN: Millis = 1_000
"""How long a shard whose server is away is left alone."""
_NO_TOKEN: Token = 2**53
_woke = itemgetter(0)
_Taken = list[tuple[Millis, Record]]
"""With the time at which each woke."""
_Empty = set[tuple[Topic, int]]
"""Where there was less than was asked for, so that no more is to be had in this call."""


class Leaser:
    """Leases for the workers of one process, and knows the heads."""

    def __init__(self, caller: Caller, layout: Layout, time: ServerTime, *, by_server: bool) -> None:
        self._caller = caller
        self._layout = layout
        self._time = time
        self._by_server = by_server
        self._heads: dict[Topic, Heads] = {}
        self._live: Mapping[str, Collection[Topic]] = {}
        self._mine: set[str] = set()

    def told(self, shard: int, topic: Topic, wake: Millis) -> Millis:
        """Something of a topic now wakes there at that time; when this process should ask."""
        heads = self._heads.get(topic)
        if heads is None:
            return wake
        heads.told(shard, wake)
        return wake if heads.mine[shard] else wake + GRACE

    def wrote(self, answers: Sequence[Any], places: Sequence[int]) -> None:
        """What this process itself has put: no need to be told of it by the server."""
        if not self._heads:
            return
        for place in places:
            record = answers[place].record
            if record is not None and record.state is State.WAITING:
                heads = self._heads.get(record.topic)
                if heads is not None:
                    heads.told(self._layout.shard_of(record.topic, record.key), record.wake_at)

    def share(self, holder: str, topics: Collection[Topic], live: Mapping[str, Collection[Topic]]) -> None:
        """`holder` is of this process (or has gone, if it has no topics), and these are all who live."""
        if topics:
            self._mine.add(holder)
        else:
            self._mine.discard(holder)
        self._live = live
        for topic, heads in self._heads.items():
            heads.mine = self._owned(topic)

    def _owned(self, topic: Topic) -> list[bool]:
        if not self._mine:  # nobody has announced anything: no need to hold back
            return [True] * self._layout.shards
        return owned(topic, self._layout.shards, self._live, self._mine)

    async def lease(self, wants: Mapping[Topic, int], now: Millis, until: Millis, holder: str) -> Leased:
        """See `ports.Store.lease`."""
        taken: _Taken = []
        empty: _Empty = set()
        since: dict[int, Token] = {}
        """Of each shard that was asked: the first token that this call may have given out."""
        room = dict(wants)
        failed: StoreError | None = None
        for topic in wants:
            if topic not in self._heads:
                self._heads[topic] = Heads(self._layout.shards)
                self._heads[topic].mine = self._owned(topic)
        first = True
        while asked := self._whom(room, self._now(now), empty, stale=first):
            first = False
            clock = steady.monotonic()
            calls = []
            for shard, shares in asked.items():
                for topic in shares:
                    self._heads[topic].asking(shard)
                first_token = since.get(shard, _NO_TOKEN)
                calls.append(Call(shard, list(shares), [until - now, holder, first_token, *shares.values()]))
            replies: list[Any] = [None] * len(calls)
            await self._caller.run(calls, replies.__setitem__, now="" if self._by_server else str(now))
            for call, reply in zip(calls, replies, strict=True):
                if isinstance(reply, StoreError):
                    failed = reply
                    for topic in call.topics:
                        self._heads[topic].answered(call.shard, self._now(now) + _AGAIN, -1, clock, plenty=False)
                else:
                    since.setdefault(call.shard, reply[2] + 1)
                    self._read(call, asked[call.shard], reply, room, taken, empty, clock)
        if failed is not None and not taken:
            raise failed
        taken.sort(key=_woke)
        wakes = [self._heads[topic].next_wake() for topic, left in room.items() if left > 0 or wants[topic] == 0]
        next_wake = min((wake for wake in wakes if wake is not None), default=None)
        return Leased([record for _, record in taken], next_wake, self._now(now))

    def _now(self, now: Millis) -> Millis:
        return int(self._time.seconds() * 1000) if self._by_server else now

    def _whom(
        self, room: Mapping[Topic, int], now: Millis, empty: _Empty, *, stale: bool
    ) -> dict[int, dict[Topic, int]]:
        """For each shard to ask: how much of which topic; nothing of those of which only the head is to be known."""
        asked: dict[int, dict[Topic, int]] = {}
        # the caller's time may pass in leaps, so that nothing that is known of it is worth anything
        before = steady.monotonic() - (CAP if self._by_server else 0)
        for topic, left in room.items():
            heads = self._heads[topic]
            if left > 0:
                due = [shard for shard in heads.due(now) if (topic, shard) not in empty]
                if due:
                    for shard, share in heads.shares(due, left).items():
                        asked.setdefault(shard, {})[topic] = share
            if stale:
                for shard in heads.stale(before):
                    asked.setdefault(shard, {}).setdefault(topic, 0)
        return asked

    def _read(
        self,
        call: Call,
        shares: Mapping[Topic, int],
        reply: list[Any],
        room: dict[Topic, int],
        taken: _Taken,
        empty: _Empty,
        clock: float,
    ) -> None:
        place = 3
        for topic in call.topics:
            waiting, leased, count = reply[place : place + 3]
            place += 3
            end = place + 3 * count
            taken += [
                (reply[at + 1], record_of(topic, reply[at].decode(), reply[at + 2])) for at in range(place, end, 3)
            ]
            place = end
            room[topic] -= count
            share = shares[topic]
            if count < share:
                empty.add((topic, call.shard))
            self._heads[topic].answered(call.shard, waiting, leased, clock, plenty=0 < share <= count)
