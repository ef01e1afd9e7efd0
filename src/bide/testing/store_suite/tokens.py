"""Fencing and identity: tokens that only rise, and ids that name one life."""

from __future__ import annotations

import pytest

from bide.core.names import new_id
from bide.core.records import Cancel, In, Move, OnConflict, Redrive, Ref, Result
from bide.ports import Store
from bide.testing.store_suite.acts import (
    KEPT,
    LEASE,
    NOW,
    SECOND,
    again,
    bring,
    dead,
    defer,
    do,
    done,
    extend,
    lease,
    look,
    new,
    put,
    put_one,
    record_of,
    retry,
    see,
    settle,
    take,
)
from bide.testing.store_suite.base import SuiteBase

FAR_OFF = 2**53 // 1_000 + SECOND
"""An instant whose microseconds are more than a double counts one by one."""


class Tokens(SuiteBase):
    """P12: `token` only ever rises for a (topic, key), so that a receiver can refuse the old."""

    async def test_every_transition_raises_the_token(self, store: Store) -> None:
        seen = [(await put_one(store)).token]

        async def note() -> None:
            seen.append((await see(store, Ref("t", "k"))).token)

        await do(store, Move("t", "k", In(0)))
        await note()
        held = await take(store)
        await note()
        assert await settle(store, retry(held, In(0)))
        await note()
        held = await take(store)
        await note()
        assert await settle(store, defer(held, In(0)))
        await note()
        held = await take(store)
        held = await take(store, now=NOW + LEASE)
        await note()
        assert await settle(store, again(held, In(0)), now=NOW)
        await note()
        assert await settle(store, dead(await take(store)))
        await note()
        await do(store, Redrive("t", "k", new_id(), In(0)))
        await note()
        await put_one(store)
        await note()
        await do(store, Cancel("t", "k", KEPT))
        await note()
        await put_one(store)
        await note()
        assert await settle(store, done(await take(store), keep_until=KEPT))
        await note()
        assert seen == sorted(set(seen)), "strictly rising"

    async def test_what_changes_nothing_leaves_the_token(self, store: Store) -> None:
        await put_one(store)
        held = await take(store)
        await store.add([new(on_conflict=OnConflict.KEEP), new(on_conflict=OnConflict.REFUSE)], now=NOW)
        await do(store, Move("t", "k", In(0)))
        await do(store, Redrive("t", "k", new_id(), In(0)))
        assert await extend(store, held, until=NOW + LEASE + SECOND)
        assert (await see(store, held)).token == held.token

    async def test_a_token_rises_also_after_the_key_was_done_and_forgotten(self, store: Store) -> None:
        last = 0
        for _ in range(5):
            await put_one(store)
            held = await take(store)
            assert held.token > last
            last = held.token
            assert await settle(store, done(held))
            assert await look(store, held) is None

    async def test_a_token_rises_also_after_a_cancel_and_a_purge(self, store: Store) -> None:
        await put_one(store)
        cancelled = record_of(await do(store, Cancel("t", "k")))
        held = await bring(store, None)
        assert held is None
        following = await put_one(store)
        assert following.token > cancelled.token
        ended = record_of(await do(store, Cancel("t", "k", NOW + SECOND)))
        assert await store.purge(now=NOW + SECOND, limit=10) == 1
        assert (await put_one(store, now=NOW)).token > ended.token

    async def test_a_token_rises_although_the_clock_goes_back(self, store: Store) -> None:
        last = 0
        for now in (NOW, NOW - 1_000 * SECOND, NOW + SECOND, NOW - SECOND, FAR_OFF, FAR_OFF, FAR_OFF - SECOND, NOW):
            record = await put_one(store, now=now)
            assert record.token > last
            last = record.token

    async def test_a_token_is_at_least_the_clock_in_microseconds(self, store: Store) -> None:
        assert (await put_one(store)).token >= NOW * 1_000

    async def test_the_tokens_of_one_batch_differ_for_one_key(self, store: Store) -> None:
        first, second = await put(store, new(), new())
        assert first.token < second.token


class Identity(SuiteBase):
    """P12: `id` names one life of a key and stays the same over its retries."""

    async def test_an_id_is_the_same_over_move_lease_retry_defer_and_loss(self, store: Store) -> None:
        life = (await put_one(store)).id
        assert record_of(await do(store, Move("t", "k", In(0)))).id == life
        held = await take(store)
        assert held.id == life
        assert await settle(store, retry(held, In(0)))
        held = await take(store)
        assert held.id == life
        assert await settle(store, defer(held, In(0)))
        assert (await take(store)).id == life
        held = await take(store, now=NOW + LEASE)
        assert held.id == life
        assert await settle(store, dead(held))
        assert (await see(store, held)).id == life

    async def test_an_id_is_new_at_replace_again_and_redrive(self, store: Store) -> None:
        lives = [(await put_one(store)).id]
        lives.append((await put_one(store)).id)
        held = await take(store)
        assert await settle(store, again(held, In(0)))
        held = await take(store)
        lives.append(held.id)
        assert await settle(store, dead(held))
        answer = await do(store, Redrive("t", "k", new_id(), In(0)))
        lives.append(record_of(answer).id)
        assert len(set(lives)) == 4

    async def test_a_kept_task_keeps_its_id(self, store: Store) -> None:
        there = await put_one(store)
        [answer] = await store.add([new(on_conflict=OnConflict.KEEP)], now=NOW)
        assert record_of(answer).id == there.id

    async def test_each_task_of_a_lease_has_the_token_that_settles_it(self, store: Store) -> None:
        await put(store, *(new(str(number)) for number in range(50)))
        held = (await lease(store, 50)).tasks
        assert await store.settle([done(record) for record in held], now=NOW) == [True] * 50

    @pytest.mark.parametrize("if_token", [0, 1, 2**53, 2**56, 2**60, 2**63 - 1])
    async def test_a_condition_that_no_token_meets_changes_nothing(self, store: Store, if_token: int) -> None:
        before = await put_one(store)
        for change in (
            Move("t", "k", In(0), if_token),
            Cancel("t", "k", if_token=if_token),
            Redrive("t", "k", new_id(), In(0), if_token),
        ):
            [answer] = await store.change([change], now=NOW)
            assert answer.result in (Result.STALE_TOKEN, Result.UNDER_WAY), change
        assert await see(store, Ref("t", "k")) == before
