"""Where everything of a namespace is: its shards, their keys, and the record by which clients agree on both.

    {ns}:layout       version and number of shards: clients that differ refuse to start
    {ns}:workers      who works on what
    {ns}:events       the capped log, and {ns}:event-refs, its index by task

    {ns:7}:n          the last token               {ns:7}:t   topics that have tasks here
    {ns:7}:g          group NUL topic NUL key      {ns:7}:f   what is kept for a while, by its keep_until
    {ns:7}:i          counts of what was odd       {ns:7}:a:* the last answer of each live caller; ends by itself
    {ns:7}:b:TOPIC    bodies by key
    {ns:7}:w:TOPIC    waiting by wake_at           {ns:7}:l:TOPIC   leased by the end of the lease
    {ns:7}:d:TOPIC    done, {ns:7}:c:TOPIC cancelled, {ns:7}:x:TOPIC dead: by finished_at

What stands in braces decides the slot in a Cluster, so that all keys of a shard are in one place and one script may
touch them; they are few and fixed for each (shard, topic), whatever the number of tasks.
"""

from __future__ import annotations

from functools import lru_cache
from zlib import crc32

from bide.core.records import State, Topic

VERSION = 1
_MOST = 65_536
"""Names of topics that are kept ready."""
INDEX_LETTERS = {State.WAITING: "w", State.LEASED: "l", State.DONE: "d", State.CANCELLED: "c", State.DEAD: "x"}
"""In the order of their numbers in a body."""


class Layout:
    """The names of one namespace's keys."""

    __slots__ = ("_fixed", "_starts", "_topics", "namespace", "shards", "tags")

    def __init__(self, namespace: str, shards: int) -> None:
        self.namespace = namespace
        self.shards = shards
        self.tags = [f"{{{namespace}:{shard}}}:" for shard in range(shards)]
        self._fixed = [tuple(f"{tag}{letter}".encode() for letter in "ntgfi") for tag in self.tags]
        self._topics = lru_cache(maxsize=_MOST)(self._topic_keys)
        self._starts: dict[str, int] = {}
        """The hash of each topic, to go on from."""

    def shard_of(self, topic: Topic, key: str) -> int:
        """By a hash that every client, of whatever version and machine, computes alike."""
        start = self._starts.get(topic)
        if start is None:
            if len(self._starts) > _MOST:
                self._starts.clear()
            start = self._starts[topic] = crc32(f"{topic}\0".encode())
        return crc32(key.encode(), start) % self.shards

    def fixed(self, shard: int, caller: bytes) -> tuple[bytes, ...]:
        """Counter, the caller's answer, topics, groups, finished, counts: as the scripts expect them."""
        counter, topics, groups, finished, counts = self._fixed[shard]
        return counter, b"%sa:%s" % (counter[:-1], caller), topics, groups, finished, counts

    def topic(self, shard: int, topic: Topic) -> tuple[bytes, ...]:
        """Bodies, and the five indexes by state."""
        return self._topics(shard, topic)

    def _topic_keys(self, shard: int, topic: Topic) -> tuple[bytes, ...]:
        tag = self.tags[shard]
        return tuple(f"{tag}{letter}:{topic}".encode() for letter in ("b", *INDEX_LETTERS.values()))

    def index(self, shard: int, topic: Topic, state: State) -> bytes:
        return self.topic(shard, topic)[1 + list(INDEX_LETTERS).index(state)]

    def topics(self, shard: int) -> bytes:
        return self._fixed[shard][1]

    def groups(self, shard: int) -> bytes:
        return self._fixed[shard][2]

    def finished(self, shard: int) -> bytes:
        return self._fixed[shard][3]

    def counts(self, shard: int) -> bytes:
        return self._fixed[shard][4]

    def common(self, name: str) -> bytes:
        """A key of the namespace as a whole."""
        return f"{{{self.namespace}}}:{name}".encode()

    def wake_channel(self, shard: int | None = None) -> bytes:
        """Where wakes are told: of one shard where channels are sharded too, else of all."""
        return self.common("wake") if shard is None else f"{self.tags[shard]}wake".encode()
