"""The keys of a namespace and its shards, and the format of a task.

    {ns}:layout       version and number of shards: a client that differs refuses to start
    {ns}:workers      the live workers with their topics
    {ns}:events       the capped log, and {ns}:event-refs, its index by task

    {ns:7}:n          the last token               {ns:7}:t   topics that have tasks here, by head
    {ns:7}:g          NUL if live, group NUL topic NUL key   {ns:7}:f   retained tasks, by keep_until
    {ns:7}:i          counts of anomalies          {ns:7}:a:* the last answer of each live caller; expires
    {ns:7}:b:TOPIC    bodies by key
    {ns:7}:w:TOPIC    waiting by wake_at           {ns:7}:l:TOPIC   leased by the end of the lease
    {ns:7}:d:TOPIC    done, {ns:7}:c:TOPIC cancelled, {ns:7}:x:TOPIC dead: by finished_at

The part in braces decides the slot in a Cluster, so all keys of a shard are on one server and one script may use them.
Each (shard, topic) has a small, fixed set of keys, whatever the number of tasks.

A leased task's body has the end that its lease had when it began: the entry in `l:` has the one that counts.

A body consists of a head, which the scripts write, and a part that they never read.

    flags 1 | token 7 | created_at 6 | due_at 6 | wake_at 6 | went through | deadline | group | id, options, payload
    `------------------- head ---------------------------'--- parts that may be missing ---'

A plain task that was never delivered takes 43 bytes plus its payload: parts that are still zero are not written.
`lua/lib.lua` documents the format and writes the head; this module writes the rest, and reads bodies.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from struct import Struct
from zlib import crc32

from bide.core.instants import Millis
from bide.core.records import NewTask, Record, State, Topic

VERSION = 1
_MOST = 65_536
"""The most topics whose key names are cached."""
INDEX_LETTERS = {State.WAITING: "w", State.LEASED: "l", State.DONE: "d", State.CANCELLED: "c", State.DEAD: "x"}
"""The letter of each state's index, in the order of the states' numbers in a body."""

RAN, DEADLINE, GROUP, OPTIONS = 8, 16, 32, 64
NO_ERROR = 0xFFFFFFFF
NO_DEADLINE = 2**48 - 1

STATES = tuple(INDEX_LETTERS)
_PLACES = {state: place for place, state in enumerate(STATES, 1)}
_RAN = Struct(">HIIIIHIHIB")
"""planned_at (6), attempt, failures, losses (4 each), finished_at, keep_until (6 each), and the size of the holder."""
_HEAD = Struct(">BBHIHIHIHI")
"""flags, token (7), created_at, due_at, wake_at (6 each)."""
_SIZE = Struct(">I")


class Layout:
    """The key names of one namespace."""

    __slots__ = (
        "_counters",
        "_starts",
        "counts",
        "finished",
        "groups",
        "namespace",
        "shards",
        "tags",
        "topic",
        "topics",
    )

    def __init__(self, namespace: str, shards: int) -> None:
        self.namespace = namespace
        self.shards = shards
        self.tags = [f"{{{namespace}:{shard}}}:" for shard in range(shards)]
        self._counters, self.topics, self.groups, self.finished, self.counts = (
            [f"{tag}{letter}".encode() for tag in self.tags] for letter in "ntgfi"
        )
        self.topic = lru_cache(maxsize=_MOST)(self._topic_keys)
        """(shard, topic): the keys for the bodies and the five indexes by state."""
        self._starts: dict[str, int] = {}

    def shard_of(self, topic: Topic, key: str) -> int:
        """The shard of a task, by a hash that is the same in every version and on every machine."""
        start = self._starts.get(topic)
        if start is None:
            if len(self._starts) > _MOST:
                self._starts.clear()
            start = self._starts[topic] = crc32(f"{topic}\0".encode())
        return crc32(key.encode(), start) % self.shards

    def fixed(self, shard: int, caller: bytes) -> tuple[bytes, ...]:
        """The keys for counter, caller's answer, topics, groups, finished, counts, in the scripts' order."""
        counter, topics, groups = self._counters[shard], self.topics[shard], self.groups[shard]
        return counter, b"%sa:%s" % (counter[:-1], caller), topics, groups, self.finished[shard], self.counts[shard]

    def _topic_keys(self, shard: int, topic: Topic) -> tuple[bytes, ...]:
        tag = self.tags[shard]
        return tuple(f"{tag}{letter}:{topic}".encode() for letter in ("b", *INDEX_LETTERS.values()))

    def index(self, shard: int, topic: Topic, state: State) -> bytes:
        return self.topic(shard, topic)[_PLACES[state]]

    def common(self, name: str) -> bytes:
        """A key that belongs to the whole namespace."""
        return f"{{{self.namespace}}}:{name}".encode()

    def wake_channel(self, shard: int | None = None) -> bytes:
        """The channel for wakes: a shard's own if channels are sharded, else that of the namespace."""
        return self.common("wake") if shard is None else f"{self.tags[shard]}wake".encode()


# --- bodies


def flags_of(new: NewTask) -> int:
    """The flags for the parts of a new task's body; its state is `waiting`, which is 0."""
    return (
        (DEADLINE if new.deadline is not None else 0)
        | (GROUP if new.group is not None else 0)
        | (OPTIONS if new.options else 0)
    )


def seed_of(new: NewTask, flags: int) -> bytes:
    """A new task's body without its head."""
    if not flags:
        return packed_id(new.id) + new.payload
    parts = b""
    if new.deadline is not None:
        parts += new.deadline.to_bytes(6, "big")
    if new.group is not None:
        group = new.group.encode()
        parts += len(group).to_bytes(1, "big") + group
    parts += packed_id(new.id)
    if new.options:
        parts += _SIZE.pack(len(new.options)) + new.options
    return parts + new.payload


def packed_id(text: str) -> bytes:
    """An id in a body's format: a UUID as 16 bytes after a zero, any other text after its size."""
    if len(text) == 36 and text[8] == text[13] == text[18] == text[23] == "-":
        digits = text.replace("-", "")
        try:
            raw = bytes.fromhex(digits)
        except ValueError:
            raw = b""
        if len(raw) == 16 and raw.hex() == digits:  # not with capitals: they would be read back as lower case
            return b"\0" + raw
    encoded = text.encode()
    return len(encoded).to_bytes(1, "big") + encoded


def record_of(topic: Topic, key: str, body: bytes) -> Record:
    """The record of a body. Raises ValueError if the body is damaged."""
    try:
        return _record_of(topic, key, body)
    except (IndexError, struct.error) as error:
        raise ValueError(f"{topic}/{key}: {error}") from error


def text_of(name: bytes) -> str:
    """The text of a name in an index. Invalid UTF-8 is not bide's, and its replacement text matches no task."""
    return name.decode("utf-8", "replace")


def _record_of(topic: Topic, key: str, body: bytes) -> Record:
    flags, t1, t2, t3, c1, c2, d1, d2, w1, w2 = _HEAD.unpack_from(body)
    place = 26
    planned = attempt = failures = losses = finished = keep = 0
    holder: str | None = None
    error: str | None = None
    deadline: Millis | None = None
    group: str | None = None
    if flags & RAN:
        p1, p2, attempt, failures, losses, f1, f2, k1, k2, size = _RAN.unpack_from(body, place)
        planned, finished, keep = p1 << 32 | p2, f1 << 32 | f2, k1 << 32 | k2
        place += 31
        if size:
            holder = str(body[place : place + size], "utf-8", "backslashreplace")
            place += size
        (size,) = _SIZE.unpack_from(body, place)
        place += 4
        if size != NO_ERROR:
            error = str(body[place : place + size], "utf-8", "backslashreplace")
            place += size
    if flags & DEADLINE:
        deadline = int.from_bytes(body[place : place + 6], "big")
        place += 6
    if flags & GROUP:
        size = body[place]
        group = str(body[place + 1 : place + 1 + size], "utf-8", "backslashreplace")
        place += 1 + size
    size = body[place]
    if size:
        life = str(body[place + 1 : place + 1 + size], "utf-8", "backslashreplace")
        place += 1 + size
    else:
        text = body[place + 1 : place + 17].hex()
        life = f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
        place += 17
    options = b""
    if flags & OPTIONS:
        (size,) = _SIZE.unpack_from(body, place)
        options = body[place + 4 : place + 4 + size]
        place += 4 + size
    if len(body) < place:
        raise IndexError("the body ends too early")
    state = STATES[flags & 7]
    ended = flags & 7 >= 2
    return Record(
        topic, key, life, group, state, d1 << 32 | d2, w1 << 32 | w2, planned, attempt, failures, losses,
        t1 << 48 | t2 << 32 | t3, holder, body[place:], options, deadline, error, c1 << 32 | c2,
        finished if ended else None, keep if ended else None,
    )  # fmt: skip
