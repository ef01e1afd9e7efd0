"""Plain reads: sent to each shard's server in one write, tried again while a server is away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any

from redis.exceptions import ResponseError

from bide.core.errors import StoreUnavailable
from bide.core.instants import Millis
from bide.core.records import Record, Ref
from bide.stores.redis.bodies import record_of
from bide.stores.redis.errors import ELSEWHERE, WAIT, Lost, NotSent, refusal, where_to_ask, word_of
from bide.stores.redis.layout import Layout
from bide.stores.redis.link import Command, Link
from bide.stores.redis.nodes import Nodes
from bide.stores.server_time import ServerTime

_SCRIPTS: dict[str, str] = {}
"""Those that change nothing, by their hash."""


def _script(name: str) -> str:
    """The hash of the script of this name."""
    text = (files("bide.stores.redis") / "lua" / f"{name}.lua").read_text(encoding="utf-8")
    sha = sha1(text.encode(), usedforsecurity=False).hexdigest()
    _SCRIPTS[sha] = text
    return sha


_PAGE, _COUNT = _script("page"), _script("count")
_MOST_EDGES = 1_000
"""Of one call: no server stands still for longer than some milliseconds."""
_PAUSE = 0.05


class Reader:
    """Asks what changes nothing, so it may be asked again as often as it takes."""

    def __init__(self, layout: Layout, nodes: Nodes, time: ServerTime, *, patience: float) -> None:
        self._layout = layout
        self._nodes = nodes
        self._time = time
        self._patience = patience

    async def ask(self, asked: Sequence[tuple[int | None, Command]]) -> list[Any]:
        """The replies to (shard, command), in order. Raises StoreUnavailable if one of them cannot be had."""
        ends = self._time.clock() + self._patience
        replies: list[Any] = [None] * len(asked)
        left = list(range(len(asked)))
        while True:
            problem = await self._round(asked, left, replies)
            left = [place for place in left if replies[place] is _NOTHING]
            if not left:
                return replies
            if self._time.clock() > ends:
                raise StoreUnavailable(str(problem))
            await asyncio.sleep(_PAUSE)

    async def _round(self, asked: Sequence[tuple[int | None, Command]], left: list[int], replies: list[Any]) -> Any:
        """Ask those that are left; what is still open afterwards is marked, and the last problem answered."""
        problem: Any = None
        groups: dict[Link, list[int]] = {}
        for place in left:
            replies[place] = _NOTHING
            try:
                groups.setdefault(await self._nodes.link(asked[place][0]), []).append(place)
            except NotSent as error:
                problem = error

        for found in await asyncio.gather(*(self._of(link, asked, places, replies) for link, places in groups.items())):
            problem = found or problem
        return problem

    async def _of(
        self, link: Link, asked: Sequence[tuple[int | None, Command]], places: list[int], replies: list[Any]
    ) -> Exception | None:
        """What one server says to its share; the last problem that there was."""
        try:
            got = await link.ask([asked[place][1] for place in places])
        except (NotSent, Lost) as error:
            await self._look_again(link)
            return error
        problem = None
        for place, reply in zip(places, got, strict=True):
            if isinstance(reply, ResponseError):
                problem = reply
                replies[place] = await self._refused(link, asked[place][1], reply)
            else:
                replies[place] = reply
        return problem

    async def _refused(self, link: Link, command: Command, reply: ResponseError) -> Any:
        """What to do about a refusal: the reply from elsewhere, or nothing, when it is worth asking again."""
        word = word_of(reply)
        try:
            if elsewhere := where_to_ask(reply):
                _, there = await self._nodes.at(*elsewhere).ask([("ASKING",), command])
                if word == "MOVED":  # for good, and not for this one call
                    await self._look_again(link)
                return _NOTHING if isinstance(there, ResponseError) else there
            if word == "NOSCRIPT":
                await link.ask([("SCRIPT", "LOAD", _SCRIPTS[str(command[1])])])
                return _NOTHING
        except (NotSent, Lost):
            return _NOTHING
        if word in ELSEWHERE:
            await self._look_again(link)
        elif word not in WAIT:
            raise refusal(reply, self._layout.namespace)
        return _NOTHING

    async def _look_again(self, link: Link) -> None:
        try:
            await self._nodes.look_again(link)
        except NotSent:
            return  # the next round meets it, too

    async def get(self, refs: Sequence[Ref]) -> list[Record | None]:
        """The tasks as they are; one that cannot be read is as good as none."""
        groups: dict[tuple[int, str], list[int]] = {}
        for place, (topic, key) in enumerate(refs):
            groups.setdefault((self._layout.shard_of(topic, key), topic), []).append(place)
        commands: list[tuple[int | None, Command]] = [
            (shard, ("HMGET", self._layout.topic(shard, topic)[0], *(refs[place][1] for place in places)))
            for (shard, topic), places in groups.items()
        ]
        records: list[Record | None] = [None] * len(refs)
        for places, bodies in zip(groups.values(), await self.ask(commands), strict=True):
            for place, body in zip(places, bodies, strict=True):
                if body is not None:
                    records[place] = _readable(refs[place], body)
        return records

    async def pages(
        self, indexes: Sequence[tuple[int, bytes]], place: Sequence[int | str | bytes]
    ) -> list[list[bytes]]:
        """One page of each (shard, index): member, score, and so on."""
        return await self.ask([(shard, ("EVALSHA", _PAGE, 1, index, *place)) for shard, index in indexes])

    async def counts(
        self, topics: Sequence[tuple[int, Sequence[bytes]]], edges: Sequence[Millis]
    ) -> list[tuple[list[int], list[int]]]:
        """Of each (shard, its five indexes of a topic): the lengths of these, and how many wait between the edges."""
        parts = [edges[start : start + _MOST_EDGES + 1] for start in range(0, max(1, len(edges) - 1), _MOST_EDGES)]
        replies = await self.ask(
            [(shard, ("EVALSHA", _COUNT, len(its), *its, *part)) for shard, its in topics for part in parts]
        )
        found: list[tuple[list[int], list[int]]] = []
        for place, (_, its) in enumerate(topics):
            of = replies[place * len(parts) : (place + 1) * len(parts)]
            lengths: list[int] = of[0][: len(its)]
            between: list[int] = []
            for reply, part in zip(of, parts, strict=True):
                counted = reply[len(its) :]
                between += counted or [0] * max(0, len(part) - 1)
            found.append((lengths, between))
        return found

    async def members(self, indexes: Sequence[bytes], after: bytes, before: bytes, count: int) -> list[list[bytes]]:
        """The first members between two bounds, of one index for each shard."""
        return await self.ask(
            [(shard, ("ZRANGEBYLEX", index, after, before, "LIMIT", 0, count)) for shard, index in enumerate(indexes)]
        )


_NOTHING = object()


def _readable(ref: Ref, body: bytes) -> Record | None:
    try:
        return record_of(ref.topic, ref.key, body)
    except ValueError:
        return None
