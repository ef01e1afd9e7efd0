"""Consumers and receivers around the service, each in a process of its own: `python -m bench.http_actors ROLE JSON`.

Each writes a line of JSON once it is ready. To `count`, a line on its input, it answers how much it has seen, and to
`report` what it has found. The end of the input ends it. Times are by the clock of this machine, which the service has
as well; every payload holds the millisecond `due` before which it must not come.

    poll        hold `polls` long-polls for `topic` open, and settle what comes
    receive     be a receiver of webhooks, which answers 204 after `hang` seconds; with `stall`, it once does nothing
                for so many seconds, when `stall_after` requests have come
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from bide_bench.worker import percentile, send, words

PAYLOAD = 100
"""Bytes, as everywhere."""
_LONGEST = 60
"""Seconds that a long-poll may wait."""
_ROOM = 10
"""Tasks that one long-poll takes at most."""
_NANOSECONDS = 1_000_000
_RECEIVED = b"HTTP/1.1 204 No Content\r\n\r\n"


def payload_of(number: int, due: int) -> dict[str, Any]:
    """That of task `number`, due at that millisecond.

    >>> len(msgspec.json.encode(payload_of(7, 1700000000000)))
    100
    """
    bare = {"n": number, "due": due, "fill": ""}
    return {**bare, "fill": "x" * (PAYLOAD - len(msgspec.json.encode(bare)))}


class _Payload(msgspec.Struct):
    n: int
    due: int


class Arrivals:
    """When each payload arrived."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, bytes]] = []
        self._decode = msgspec.json.Decoder(_Payload).decode

    def note(self, payload: bytes) -> None:
        self._seen.append((time.time_ns(), payload))

    @property
    def count(self) -> int:
        return len(self._seen)

    def report(self) -> dict[str, Any]:
        """Counts, the last instant, and percentiles of the lateness in ms, of each task's first arrival."""
        late: dict[int, float] = {}
        early = 0
        for at, raw in self._seen:
            payload = self._decode(raw)
            early += at < payload.due * _NANOSECONDS
            late.setdefault(payload.n, at / _NANOSECONDS - payload.due)
        lengths = sorted(late.values())
        return {
            "count": len(self._seen),
            "distinct": len(late),
            "early": early,
            "last_ns": self._seen[-1][0] if self._seen else 0,
            **{
                f"{name}_ms": percentile(lengths, part) if lengths else 0.0
                for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
            },
        }


class _Leased(msgspec.Struct):
    topic: str
    key: str
    token: int
    payload: msgspec.Raw


class Poll:
    """Leases by long-polls, and settles in one call whatever came during the last one.

    The ends of the first polls are spread over a minute, as they are after some hours.
    """

    def __init__(self, url: str, topic: str, polls: int) -> None:
        self._url = url
        self._topic = topic
        self._polls = polls
        self._arrivals = Arrivals()
        self._unsettled: asyncio.Queue[_Leased] = asyncio.Queue()
        self._refused: list[str] = []
        self._answered = 0
        self.count = 0
        """Tasks that are settled."""

    async def begin(self) -> dict[str, Any]:
        self._session = aiohttp.ClientSession(
            self._url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=2 * _LONGEST)
        )
        chance = random.Random(8420)
        self._running = [asyncio.create_task(self._settle())]
        for number in range(self._polls):
            self._running.append(asyncio.create_task(self._poll(chance.uniform(5, _LONGEST))))
            if number % 50 == 49:
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        return {}

    async def _poll(self, wait: float) -> None:
        decode = msgspec.json.Decoder(dict[str, list[_Leased]]).decode
        while True:
            said = await self._post("/v1/lease", {"topics": {self._topic: _ROOM}, "wait": f"{wait:.3f}s"})
            wait = _LONGEST
            if not said:
                await asyncio.sleep(0.1)
                continue
            self._answered += 1
            for task in decode(said)["tasks"]:
                self._arrivals.note(bytes(task.payload))
                self._unsettled.put_nowait(task)

    async def _settle(self) -> None:
        decode = msgspec.json.Decoder(dict[str, list[bool]]).decode
        while True:
            tasks = [await self._unsettled.get()]
            while not self._unsettled.empty():
                tasks.append(self._unsettled.get_nowait())
            done = [{"topic": one.topic, "key": one.key, "token": one.token, "outcome": "done"} for one in tasks]
            said = await self._post("/v1/settle", done)
            self.count += sum(decode(said)["settled"]) if said else 0

    async def _post(self, path: str, body: object) -> bytes:
        """The answer; nothing if that was a refusal, which is noted."""
        headers = {"content-type": "application/json"}
        async with self._session.post(path, data=msgspec.json.encode(body), headers=headers) as answer:
            said = await answer.read()
            if answer.status == 200:
                return said
        self._refused.append(f"{answer.status} {said[:200].decode(errors='replace')}")
        return b""

    def report(self) -> dict[str, Any]:
        refused = [*self._refused, *(str(task.exception()) for task in self._running if task.done())]
        return {
            **self._arrivals.report(), "answered": self._answered, "settled": self.count, "refused": len(refused),
            "example": "; ".join(refused[:1]),
        }  # fmt: skip

    async def end(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._session.close()


class _Connection(asyncio.Protocol):
    """One connection of HTTP/1.1: takes requests with a content-length, and reads nothing but the body."""

    def __init__(self, to: Receive) -> None:
        self._to = to
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._read += data
        while True:
            head, end, rest = self._read.partition(b"\r\n\r\n")
            if not end:
                return
            size = int(head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0] or 0)
            if len(rest) < size:
                return
            self._to.note(rest[:size])
            self._read = rest[size:]
            if self._to.stall and self._to.count == self._to.stall_after:
                time.sleep(self._to.stall)  # as a pause of its garbage collector, or of its machine
            if self._to.hang:
                asyncio.get_running_loop().call_later(self._to.hang, self._answer)
            else:
                self._transport.write(_RECEIVED)

    def _answer(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(_RECEIVED)


class Receive(Arrivals):
    """Takes webhooks."""

    def __init__(self, hang: float = 0.0, stall: float = 0.0, stall_after: int = 0) -> None:
        super().__init__()
        self.hang, self.stall, self.stall_after = hang, stall, stall_after

    async def begin(self) -> dict[str, Any]:
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self), "127.0.0.1", 0, backlog=1024
        )
        return {"port": self._server.sockets[0].getsockname()[1]}

    async def end(self) -> None:
        self._server.close()


ROLES: Mapping[str, type[Poll] | type[Receive]] = {"poll": Poll, "receive": Receive}


async def _play(role: str, given: Mapping[str, Any]) -> None:
    one = ROLES[role](**given)
    send(began=await one.begin())
    try:
        async for word in words():
            if word == "stop":
                return
            send(**{word: one.count if word == "count" else one.report()})
    finally:
        await one.end()


if __name__ == "__main__":
    asyncio.run(_play(sys.argv[1], msgspec.json.decode(sys.argv[2])))
