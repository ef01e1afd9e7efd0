"""Runs a script on a shard exactly once, however often the call is sent.

Each call carries the caller's name and a number that only rises. The shard keeps the last answer of each live caller,
written in the same step as the work. So if an answer was lost, the same call is sent again: if it was done, the shard
repeats the answer, else it does the call now. This requires that a caller has one call under way per shard, so each
kind of operation is a separate caller: settling does not wait for scheduling.

A refused call was not done. By the first word of the refusal, the call waits a moment or finds the right server (see
`topology`). If the outcome is still unknown when `patience` ends, only the tasks of that shard get `OutcomeUnknown`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha1
from importlib.resources import files
from time import monotonic
from typing import Any, NamedTuple

from msgspec import Struct
from redis.exceptions import ResponseError

from bide.core.errors import OutcomeUnknown, StoreError, StoreUnavailable
from bide.stores.redis.layout import Layout
from bide.stores.redis.topology import (
    ELSEWHERE,
    WAIT,
    Command,
    SharedConnection,
    Topology,
    UnderReplicated,
    refusal,
    said,
    where_to_ask,
    word_of,
)
from bide.stores.resending import Lost, NotSent, Resending
from bide.stores.server import ServerTime

_AT_ONCE = 2
"""The most resends without a pause, because servers may redirect a call to each other endlessly."""
_FOLDER = files("bide.stores.redis") / "lua"
DRAINS = frozenset({"change", "lease", "extend", "settle", "purge"})
"""The scripts that must work on a server whose memory is full (P9): it refuses only `add`."""


class Script(NamedTuple):
    """A script as it is loaded on a server."""

    name: str
    text: str
    sha: str


def script(name: str, *, flags: bool, library: bool = True) -> Script:
    """The script `name`. `library`: with the code that all writing scripts share. `flags`: the server supports script
    flags (Redis 7, Valkey), so a draining script is marked `allow-oom`."""
    text = (_FOLDER / f"{name}.lua").read_text(encoding="utf-8")
    if library:
        text = (_FOLDER / "lib.lua").read_text(encoding="utf-8") + text
    if flags:
        text = f"#!lua{' flags=allow-oom' if name in DRAINS else ''}\n{text}"
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())


class Call(NamedTuple):
    """A call to one shard: the topics whose keys the script needs, and its own arguments."""

    shard: int
    topics: Sequence[str]
    arguments: Sequence[str | bytes | int]


class _Sent(Struct, eq=False):
    """A call under way."""

    place: int
    call: Call
    command: Command
    at: float
    answer: asyncio.Future[list[Any]]
    turn: asyncio.Semaphore


Read = Callable[[int, Any], None]


class ShardCaller:
    """Sends a command to the server of its shard, again and again, until the reply is final."""

    def __init__(self, topology: Topology, layout: Layout, patience: float, *scripts: Script) -> None:
        self.layout = layout
        self._topology = topology
        self._patience = patience
        self._texts = {one.sha: one.text for one in scripts}
        self.resent = 0
        """The number of resends."""

    async def _ask(self, connection: SharedConnection, commands: Sequence[Command], *, fresh: bool) -> Sequence[Any]:
        """The replies, or an error for each command. `fresh`: the commands were not sent before."""
        try:
            return await connection.ask(commands)
        except (NotSent, Lost, StoreUnavailable) as error:
            return [error] * len(commands)

    def _where(self, shard: int | None) -> str:
        """The call, for the text of errors."""
        return self.layout.namespace

    def _why(self, shard: int | None, problem: Any) -> str:
        return said(problem)

    async def _reply(self, shard: int | None, command: Command, first: Any, *, reads: bool = False) -> Any:
        """Send until the reply is final. `first`: the reply so far. `reads`: it changes nothing. Raises StoreError."""
        resending = Resending(self._patience)
        reply, at_once = first, 0
        ask: SharedConnection | None = None
        connection: SharedConnection | None = None
        while True:
            if reply is None:
                asking, ask = ask, None
                try:
                    connection = asking or await self._topology.connection(shard)
                    commands: list[Command] = [command] if asking is None else [("ASKING",), command]
                    reply = (await self._ask(connection, commands, fresh=not resending.may_be_done))[-1]
                except (NotSent, StoreUnavailable) as error:
                    reply = error
            if not isinstance(reply, Exception):
                return reply
            if isinstance(reply, StoreError):
                raise resending.refused(reply)
            self.resent += 1
            wait, word = True, word_of(reply) if isinstance(reply, ResponseError) else ""
            if isinstance(reply, (Lost, UnderReplicated)):
                resending.may_be_done = not reads
            elif isinstance(reply, ResponseError) and (there := where_to_ask(reply)):
                ask, wait = self._topology.at(*there), False
            elif word == "NOSCRIPT":
                if (refused := await self._load(connection, shard, str(command[1]))) is not None:
                    raise resending.refused(refusal(refused, self._where(shard)))
                wait = False
            elif word == "BIDEOLD":
                raise OutcomeUnknown(str(reply))
            elif isinstance(reply, ResponseError) and word not in WAIT | ELSEWHERE:
                raise resending.refused(refusal(reply, self._where(shard)))
            at_once += not wait
            if wait or at_once > _AT_ONCE:
                await resending.pause(self._why(shard, reply))
            if isinstance(reply, (NotSent, Lost)) or word in ELSEWHERE:
                try:
                    await self._topology.rediscover()
                except (NotSent, StoreUnavailable) as error:
                    if monotonic() > resending.ends:
                        raise resending.given_up(str(error)) from error
            reply = None

    async def _load(self, connection: SharedConnection | None, shard: int | None, sha: str) -> ResponseError | None:
        """Load a script on the server; return the error if the server refuses it."""
        try:
            connection = connection or await self._topology.connection(shard)
            [reply] = await connection.ask([("SCRIPT", "LOAD", self._texts[sha])])
        except (NotSent, Lost, StoreUnavailable):
            return None  # the next try meets the same error
        return reply if isinstance(reply, ResponseError) else None


class ScriptClient(ShardCaller):
    """One kind of operation of one store."""

    def __init__(
        self,
        script: Script,
        name: bytes,
        layout: Layout,
        topology: Topology,
        time: ServerTime,
        *,
        patience: float,
        publish: str = "",
        channels: Sequence[bytes] = (),
        wait_replicas: int = 0,
        wait_for: float = 0.5,
    ) -> None:
        super().__init__(topology, layout, patience, script)
        self.script = script
        self._name = name
        self._time = time
        self._publish = publish
        self._channels = channels
        self._wait: Command | None = ("WAIT", wait_replicas, int(wait_for * 1000)) if wait_replicas else None
        self._replicas = wait_replicas
        self._numbers = [0] * layout.shards
        self._turns = [asyncio.Semaphore(1) for _ in range(layout.shards)]
        """The turn of each shard: a semaphore, which can be acquired without waiting if it is not locked."""

    async def run(self, calls: Iterable[Call], read: Read, *, now: str = "") -> None:
        """Send all calls concurrently; `read` gets the place of each with its reply or error.

        `calls` may be a generator: the first calls are sent while later ones are made, and `read` handles the first
        replies while the server works on the last calls. `now`: the caller's time, if the store uses that.
        """
        sent: deque[_Sent] = deque()
        """The calls whose turns this method still has to release."""
        slow: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        try:
            for place, call in enumerate(calls):
                turn = self._turns[call.shard]
                connection = self._topology.ready(call.shard) if not (turn.locked() or self._wait) else None
                if connection is None:
                    slow.append(loop.create_task(self._one(place, call, now, read), name="bide call"))
                    continue
                command = self._command(call, now)
                answer = connection.post([command])  # before the turn is acquired: it may refuse an argument
                await turn.acquire()  # does not wait: the turn is free
                sent.append(_Sent(place, call, command, monotonic(), answer, turn))
                if connection.plenty:
                    await connection.flush()
            while sent:
                one = sent[0]
                try:
                    [reply] = await one.answer
                except Lost as lost:
                    reply = lost
                sent.popleft()
                if type(reply) is list:
                    one.turn.release()
                    self._time.saw(reply[0], one.at, monotonic())
                    read(one.place, reply)
                else:
                    task = loop.create_task(self._go_on(one, reply, read), name="bide call")
                    # by a callback: a task that is cancelled before it begins has no `finally`
                    task.add_done_callback(lambda _, turn=one.turn: turn.release())  # type: ignore[misc]
                    slow.append(task)
            if slow:
                await asyncio.gather(*slow)
        except BaseException:
            for task in slow:
                task.cancel()
            raise
        finally:
            for one in sent:
                one.turn.release()

    async def _one(self, place: int, call: Call, now: str, read: Read) -> None:
        """Send one call when its turn has come, and resend it until its outcome is known."""
        async with self._turns[call.shard]:
            reply = await self._until_known(call, self._command(call, now))
        read(place, reply)

    async def _go_on(self, sent: _Sent, first: Any, read: Read) -> None:
        """Resend a call that got no answer. Its turn is released when the task is done."""
        read(sent.place, await self._until_known(sent.call, sent.command, first))

    def _command(self, call: Call, now: str) -> Command:
        shard, topics, arguments = call
        self._numbers[shard] += 1
        keys = [*self.layout.fixed(shard, self._name)]
        for topic in topics:
            keys.extend(self.layout.topic(shard, topic))
        channel = self._channels[shard] if self._channels else b""
        return (
            "EVALSHA", self.script.sha, len(keys), *keys,
            self._numbers[shard], now, self._publish, channel, shard, len(topics), *topics, *arguments,
        )  # fmt: skip

    async def _ask(self, connection: SharedConnection, commands: Sequence[Command], *, fresh: bool) -> Sequence[Any]:
        """The replies, or an error for each command. With `wait_replicas`, a reply counts only once replicas have it.

        `fresh`: the commands were not sent before. A repeated answer carries the time of the first one.
        """
        sent = monotonic()
        replies = await super()._ask(connection, [*commands, self._wait] if self._wait else commands, fresh=fresh)
        if fresh and type(replies[0]) is list:
            self._time.saw(replies[0][0], sent, monotonic())
        if self._wait:
            *replies, reached = replies
            if not isinstance(reached, int) or reached < self._replicas:
                few = UnderReplicated(
                    f"{connection.name}: done, but {reached} of {self._replicas} replicas have it: "
                    "a failover may undo it"
                )
                return [few if type(reply) is list else reply for reply in replies]
        return replies

    async def _until_known(self, call: Call, command: Command, first: Any = None) -> Any:
        """Send until the reply is final; return it, or a StoreError. `first`: the reply so far."""
        try:
            return await self._reply(call.shard, command, first)
        except StoreError as error:
            return error

    def _where(self, shard: int | None) -> str:
        return f"{self.script.name} on shard {shard} of {self.layout.namespace}"

    def _why(self, shard: int | None, problem: Any) -> str:
        return f"{self._where(shard)}: {said(problem)}"
