"""Those who stand around the service, each in a process of its own: `python -m bench.http_actors ROLE JSON`.

Each writes a line of JSON once it is ready. To `count`, a line on its input, it answers how much it has seen, and to
`report` what it has found. The end of the input ends it. Times are by the clock of this machine, which the service has
as well; every payload holds the millisecond `due` before which nobody wants it.

    pace      schedule `seconds` x `rate` times a task for each of `tasks` (topic, headers), due `ahead` ms later;
              reports by itself when that is done
    consume   hold `polls` long-polls for `topic` open, and settle what comes
    wait      hold `polls` long-polls for `topic` open, of 60 s each; the first ones end one after another
    receive   be a receiver of webhooks, which answers 204 after `hang` seconds; with `stall`, it once does nothing for
              so many seconds, when `stall_after` requests have come
"""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from bide.cli.bench.worker import paced, percentile, say, words
from bide.core.instants import instant_text

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
    """When what arrived."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, bytes]] = []
        self._decode = msgspec.json.Decoder(_Payload).decode

    def note(self, payload: bytes) -> None:
        self._seen.append((time.time_ns(), payload))

    @property
    def count(self) -> int:
        return len(self._seen)

    def report(self) -> dict[str, Any]:
        """Counts, the first and last instant, and percentiles of the lateness in ms, of each task's first arrival."""
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
            "first_ns": self._seen[0][0] if self._seen else 0,
            "last_ns": self._seen[-1][0] if self._seen else 0,
            **{
                f"{name}_ms": percentile(lengths, part) if lengths else 0.0
                for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
            },
        }


class Role(ABC):
    """One of them; `given` is what it was started with."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given

    async def begin(self) -> dict[str, Any]:
        """Start what goes on; what is said then."""
        return {}

    async def go_on(self) -> dict[str, Any] | None:
        """Do its part by itself, and return what is said when that is done; None: nothing."""
        return None

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """The figures so far."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How much it has seen so far."""

    @abstractmethod
    async def end(self) -> None:
        """Stop what goes on."""


class _Client(Role):
    """Calls the service."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self.url: str = given["url"]
        self.refused: list[str] = []
        """The answers where 200 or 201 was expected."""
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)
        )
        self.running: list[asyncio.Task[None]] = []

    async def post(self, path: str, body: object, method: str = "POST") -> bytes:
        """The answer; nothing if that was a refusal, which is noted."""
        async with self.session.request(
            method, self.url + path, data=msgspec.json.encode(body), headers={"content-type": "application/json"}
        ) as answer:
            said = await answer.read()
            if answer.status in (200, 201):
                return said
        self.refused.append(f"{answer.status} {said[:200].decode(errors='replace')}")
        return b""

    async def end(self) -> None:
        for task in self.running:
            task.cancel()
        for ended in await asyncio.gather(*self.running, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        await self.session.close()


class Pace(_Client):
    """Schedules at a rate, whatever each call takes."""

    scheduled = 0
    behind = 0.0

    async def go_on(self) -> dict[str, Any]:
        rate, ahead, prefix = self.given["rate"], self.given["ahead"], secrets.token_hex(6)
        calls = []
        begun = time.monotonic()
        async for number in paced(round(self.given["seconds"] * rate), rate):
            self.behind = max(self.behind, time.monotonic() - begun - number / rate)
            calls.append(asyncio.create_task(self._schedule(number, f"{prefix}-{number}", ahead)))
        await asyncio.gather(*calls)
        return self.report()

    async def _schedule(self, number: int, key: str, ahead: int) -> None:
        due = time.time_ns() // _NANOSECONDS + ahead
        tasks = self.given["tasks"]
        common = {"payload": payload_of(number, due), "at": instant_text(due)}
        if len(tasks) == 1:
            body = common | {"headers": tasks[0]["headers"]} if tasks[0]["headers"] else common
            await self.post(f"/v1/topics/{tasks[0]['topic']}/tasks/{key}", body, "PUT")
        else:
            batch = [common | task | {"key": f"{key}-{place}"} for place, task in enumerate(tasks)]
            answers = await self.post("/v1/schedule", batch)
            if answers.count(b'"answer":"created"') != len(tasks):
                self.refused.append(answers[:200].decode(errors="replace"))
        self.scheduled += 1

    def report(self) -> dict[str, Any]:
        return {
            "count": self.scheduled, "refused": len(self.refused), "example": "; ".join(self.refused[:1]),
            "behind_ms": round(self.behind * 1000, 1),
        }  # fmt: skip

    @property
    def count(self) -> int:
        return self.scheduled


class _Leased(msgspec.Struct):
    topic: str
    key: str
    token: int
    payload: msgspec.Raw


class _Answer(msgspec.Struct):
    tasks: list[_Leased]


class _Settled(msgspec.Struct):
    settled: list[bool]


class Consume(_Client):
    """Leases by long-polls; settles beside them, all that has come meanwhile at once."""

    async def begin(self) -> dict[str, Any]:
        self.arrivals = Arrivals()
        self.unsettled: asyncio.Queue[_Leased] = asyncio.Queue()
        self.settled = 0
        self.running = [asyncio.create_task(self._poll()) for _ in range(self.given["polls"])]
        self.running.append(asyncio.create_task(self._settle()))
        await asyncio.sleep(0.5)
        return {}

    async def _poll(self) -> None:
        body = {"topics": {self.given["topic"]: _ROOM}, "wait": "30s"}
        decode = msgspec.json.Decoder(_Answer).decode
        while True:
            said = await self.post("/v1/lease", body)
            if not said:
                await asyncio.sleep(0.1)
                continue
            for task in decode(said).tasks:
                self.arrivals.note(bytes(task.payload))
                self.unsettled.put_nowait(task)

    async def _settle(self) -> None:
        decode = msgspec.json.Decoder(_Settled).decode
        while True:
            tasks = [await self.unsettled.get()]
            while not self.unsettled.empty():
                tasks.append(self.unsettled.get_nowait())
            done = [{"topic": one.topic, "key": one.key, "token": one.token, "outcome": "done"} for one in tasks]
            said = await self.post("/v1/settle", done)
            self.settled += sum(decode(said).settled) if said else 0

    def report(self) -> dict[str, Any]:
        return self.arrivals.report() | {"settled": self.settled, "refused": len(self.refused)}

    @property
    def count(self) -> int:
        return self.settled


class Wait(_Client):
    """Long-polls that find nothing. Their ends are spread over the minute from the start, as after some hours."""

    answered = found = 0

    async def begin(self) -> dict[str, Any]:
        chance = random.Random(8420)
        for number in range(self.given["polls"]):
            self.running.append(asyncio.create_task(self._poll(chance.uniform(5, _LONGEST))))
            if number % 50 == 49:
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)
        return {"open": len(self.running)}

    async def _poll(self, first: float) -> None:
        wait = first
        while True:
            said = await self.post("/v1/lease", {"topics": {self.given["topic"]: 1}, "wait": f"{wait:.3f}s"})
            wait = _LONGEST
            self.answered += 1
            self.found += said != b'{"tasks":[]}'

    def report(self) -> dict[str, Any]:
        broken = [task for task in self.running if task.done()]
        return {
            "answered": self.answered, "found": self.found, "refused": len(self.refused) + len(broken),
            "example": "; ".join(self.refused[:1] or [str(task.exception()) for task in broken[:1]]),
        }  # fmt: skip

    @property
    def count(self) -> int:
        return self.answered


class _Connection(asyncio.Protocol):
    """One connection of HTTP/1.1: takes requests with a content-length, and looks at nothing but the body."""

    def __init__(self, arrivals: Arrivals, hang: float, stall: float = 0.0, stall_after: int = 0) -> None:
        self._arrivals = arrivals
        self._hang = hang
        self._stall = stall
        self._stall_after = stall_after
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
            self._arrivals.note(rest[:size])
            self._read = rest[size:]
            if self._stall and self._arrivals.count == self._stall_after:
                time.sleep(self._stall)  # as a pause of its garbage collector, or of its machine
            if self._hang:
                asyncio.get_running_loop().call_later(self._hang, self._answer)
            else:
                self._transport.write(_RECEIVED)

    def _answer(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(_RECEIVED)


class Receive(Role):
    """Takes webhooks."""

    async def begin(self) -> dict[str, Any]:
        self.arrivals = Arrivals()
        self.server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self.arrivals, **self.given), "127.0.0.1", 0, backlog=1024
        )
        return {"port": self.server.sockets[0].getsockname()[1]}

    def report(self) -> dict[str, Any]:
        return self.arrivals.report()

    @property
    def count(self) -> int:
        return self.arrivals.count

    async def end(self) -> None:
        self.server.close()


ROLES: Mapping[str, type[Role]] = {"pace": Pace, "consume": Consume, "wait": Wait, "receive": Receive}


async def _play(role: str, given: Mapping[str, Any]) -> None:
    one = ROLES[role](given)
    say(began=await one.begin())
    try:
        done = await one.go_on()
        if done is not None:
            say(done=done)
        async for word in words():
            if word == "stop":
                return
            say(**{word: one.count if word == "count" else one.report()})
    finally:
        await one.end()


if __name__ == "__main__":
    asyncio.run(_play(sys.argv[1], msgspec.json.decode(sys.argv[2])))
