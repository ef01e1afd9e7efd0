"""The keys of a namespace in a real Redis, changed at random by somebody else.

**What is accepted.** Damage to entries (a body, a field, a member, a score) is the matter of that task alone: every
call goes on, whatever is sound and due is leased, and after that the next wake lies ahead, so that no worker asks again
and again. Damage to a key (another type, text for a number) may fail the calls that need it, with StoreCorrupt or
StoreMismatch, and the tasks of the other shards are still leased. Of what is remembered of a caller's last call it may
be said that the outcome is not known. Nothing else is raised.

**What nobody can see.** A body whose bytes were changed into those of another sound body is that other task from then
on; a deleted key, or one with fewer fields, is a task that is not there. Tasks that were touched are left out of what
has to be leased.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from typing import Any

import pytest
import redis
from hypothesis import strategies as st
from tests.fuzz.cases import NUMBERS, fuzz, near_bytes, refusals
from tests.fuzz.conftest import Loop
from tests.fuzz.playing import Kept, fill, play
from tests.fuzz.test_cursors import look
from tests.servers.fixtures import not_installed

from bide.core.errors import OutcomeUnknown, PartlyFailed, StoreCorrupt, StoreError, StoreMismatch
from bide.core.records import OutcomeKind, Ref
from bide.stores.redis import RedisStore
from bide.stores.redis.layout import Layout
from bide.testing.clock import FIRST_INSTANT as NOW
from bide_proofs.servers.process import ServerMissing
from bide_proofs.servers.redis import RedisServer

SHARDS = 3
REFS = [Ref(topic, f"k{number}") for topic in ("t", "u") for number in range(8)]
LAYOUT = Layout("f", SHARDS)
CLEAR = (StoreCorrupt, StoreMismatch)
ODD = st.sampled_from([b"odd", b"\xff\xfe", b"", b"k1\0", "é".encode()]) | st.binary(min_size=8, max_size=8)
SCORES = st.sampled_from([0, -1, NOW, 1e18, 1e300, float("inf"), float("-inf"), 0.5]) | NUMBERS


class Vandal:
    """Changes keys, and knows what may be missed after that."""

    def __init__(self, client: Any, draws: st.DataObject) -> None:
        self._client = client
        self._draw = draws.draw
        self.shards: set[int] = set()
        """Of which a key as a whole is damaged."""
        self.common = False
        """A key that all shards need is damaged."""
        self.unordered = False
        """An index by name, in which all scores have to be the same, has several: then it has no order."""
        self.answers = False
        """What is remembered of a caller's last call is changed: whether it was done cannot be known then."""
        self.refs: set[Ref] = set()
        """Tasks of which an entry is damaged."""

    @property
    def of_keys(self) -> bool:
        return bool(self.shards) or self.common

    def change(self) -> None:
        """One key, or an entry of it."""
        key = self._draw(st.sampled_from(sorted(self._client.keys("*"))))
        if self._draw(st.integers(1, 4)) == 1:
            self._change_key(key)
        else:
            self._change_entry(key, self._client.type(key))

    def _damage_key(self, key: bytes) -> None:
        self.answers = self.answers or b"}:a:" in key
        number = key.partition(b"}")[0].rpartition(b":")[2]
        if number.isdigit():
            self.shards.add(int(number))
        else:
            self.common = True

    def _change_key(self, key: bytes) -> None:
        """It is something else, or gone."""
        self._damage_key(key)
        self._client.delete(key)
        match self._draw(st.sampled_from(["deleted", "string", "list", "hash", "set", "zset"])):
            case "string":
                self._client.set(key, self._draw(st.sampled_from([b"", b"x", b"-5", b"1e400"]) | ODD))
            case "list":
                self._client.rpush(key, b"x")
            case "hash":
                self._client.hset(key, self._draw(st.sampled_from(["odd", "damaged"])), self._draw(ODD))
            case "set":
                self._client.sadd(key, self._draw(ODD))
            case "zset":
                self._client.zadd(key, {self._draw(ODD): self._draw(st.sampled_from([0, 1e300, float("inf")]))})

    def _change_entry(self, key: bytes, kind: bytes) -> None:
        """It is changed, lost, or put in."""
        letter, _, name = key.partition(b"}:")[2].partition(b":")
        if kind == b"hash":
            self._change_field(key, letter, name)
        elif kind == b"zset":
            self._change_member(key, letter, name)
        elif kind == b"stream":
            self._client.xadd(key, {self._draw(st.just(b"t") | ODD): self._draw(ODD), b"e": self._draw(ODD)})
        elif kind == b"set":
            self._client.sadd(key, self._draw(ODD))
        elif kind == b"string" and letter == b"n" and self._draw(st.booleans()):  # a counter, set back
            self._client.set(key, self._draw(st.sampled_from([0, 1, NOW, 2**53 - 1])))
        elif kind == b"string":
            self._damage_key(key)
            self.answers = self.answers or letter != b"n"
            self._client.set(key, self._draw(near_bytes(self._client.get(key) or b"") | st.just(b"1e400")))

    def _change_field(self, key: bytes, letter: bytes, topic: bytes) -> None:
        fields: dict[bytes, bytes] = self._client.hgetall(key)
        field = self._draw(st.sampled_from(sorted(fields)))
        self._touch(letter, topic, field)
        self.common = self.common or letter == b"layout"
        what = self._draw(st.sampled_from(["lost", "changed", "changed", "put in", "renamed"]))
        if what in ("lost", "renamed"):
            self._client.hdel(key, field)
        if what == "renamed":
            self._client.hset(key, self._draw(ODD), fields[field])
        elif what != "lost":
            name = field if what == "changed" else self._draw(ODD)
            self._client.hset(key, name, self._draw(near_bytes(fields[field])))

    def _change_member(self, key: bytes, letter: bytes, topic: bytes) -> None:
        member = self._draw(st.sampled_from(self._client.zrange(key, 0, -1)))
        self._touch(letter, topic, member)
        what = self._draw(st.sampled_from(["lost", "score", "put in", "put in"]))
        if what == "lost":
            self._client.zrem(key, member)
            return
        self.unordered = self.unordered or letter == b"g"
        put_in = st.sampled_from([member, b"g\0t\0k1", b"t\0gone"]) | ODD
        self._client.zadd(key, {member if what == "score" else self._draw(put_in): self._draw(SCORES)})

    def _touch(self, letter: bytes, topic: bytes, entry: bytes) -> None:
        text = entry.decode("utf-8", "replace")
        if letter in (b"g", b"f"):
            self.refs |= {ref for ref in REFS if ref.key in text}
        else:
            self.refs |= {ref for ref in REFS if (ref.topic, ref.key) == (topic.decode("utf-8", "replace"), text)}

    async def may(self, call: Awaitable[Any]) -> Any:
        """What it answers; None where damage to a key is told as such."""
        answers = None
        with refusals(OutcomeUnknown, PartlyFailed, *CLEAR) as refused:
            answers = await call
        for error in refused:
            if isinstance(error, OutcomeUnknown):
                assert self.answers, f"it is not known whether it was done: {error}"
            else:
                assert self.of_keys, f"damage to entries fails others: {error}"
            if isinstance(error, PartlyFailed):
                told = (*CLEAR, OutcomeUnknown) if self.answers else CLEAR
                assert all(isinstance(one, told) for one in error.answers if isinstance(one, StoreError))
        return answers


async def case(url: str, client: Any, draws: st.DataObject) -> None:
    client.flushall()
    store = RedisStore(f"{url}?namespace=f&shards={SHARDS}", clock="caller")
    await store.open()
    try:
        dead = await fill(store, REFS, (None, "g"))
        if draws.draw(st.booleans()):
            await store.close()
        vandal = Vandal(client, draws)
        for _ in range(draws.draw(st.integers(1, 3))):
            vandal.change()
        with refusals(*CLEAR) as refused:
            await store.open()
        if refused:
            assert vandal.common, f"it does not open: {refused}"
            return
        if not vandal.of_keys and not vandal.unordered:
            await look(store, draws)
        calm = {ref for ref in REFS if ref not in vandal.refs and LAYOUT.shard_of(*ref) not in vandal.shards}
        kept = Kept(REFS, set() if vandal.common else calm, calm, whole=not vandal.of_keys)
        verdict = draws.draw(st.sampled_from([OutcomeKind.DONE, OutcomeKind.RETRY]))
        missing = kept.found - {dead} - set((await play(store, kept, verdict, vandal.may)).leased)
        assert not missing, f"sound, due, and not leased: {missing}"
    finally:
        await store.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of our own: all that it holds is thrown away again and again."""
    try:
        with RedisServer(tmp_path_factory.mktemp("redis")) as server:
            yield server.url
    except ServerMissing as error:
        not_installed(error)


@fuzz(40, seconds=20, draws=st.data())
def test_values(url: str, loop: Loop, draws: st.DataObject) -> None:
    with redis.Redis.from_url(url) as client:
        loop.finish(case(url, client, draws))
