"""The receiver of the webhooks, which applies each effect once, and the judge of its deliveries.

It checks deliveries, and sometimes fails, hangs up or is slow. The judge compares the deliveries with the history.
"""

from __future__ import annotations

import asyncio
import base64
import random
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Self, TypeAlias

import msgspec
from aiohttp import web
from msgspec.structs import replace
from standardwebhooks import Webhook

from bide.core.records import OutcomeKind, Token
from bide.testing.history import events as ev
from bide.testing.history.events import Event
from bide_proofs.servers.process import HOST
from bide_proofs.torture.child import DYING, LEASE

KINDS = (
    "bad_delivery", "unknown_delivery", "not_applied", "unacknowledged", "unheard", "applied_twice", "stale_applied",
)  # fmt: skip
APPLIED, REPEATED, STALE, NONE = "applied", "repeated", "stale", "none"
"""The result of a delivery: applied; repeated for this life; refused for an older token; failed."""
Ref: TypeAlias = tuple[str, str, Token]
_FAILS, _HANGS_UP, _SLOW = 0.03, 0.03, 0.01
_DIES = 0.5
"""The fraction of deliveries of one topic that are answered with 410, so that their tasks die."""
_LONGEST = 1.0
"""The most seconds that a slow answer takes."""


class Arrived(msgspec.Struct, frozen=True, gc=False):
    """A delivery, and its result at the receiver."""

    topic: str
    key: str
    id: str
    token: Token
    attempt: int
    at: int
    """Nanoseconds of the monotonic clock."""
    effect: str = APPLIED
    acknowledged: bool = True
    """True if it was answered with 200 on an intact connection."""


def judge(arrivals: Sequence[Arrived], events: Iterable[Event]) -> dict[str, list[object]]:
    """The failures, by kind. Both arguments are in the order of time."""
    wrong: dict[str, list[object]] = {kind: [] for kind in KINDS}
    began: dict[Ref, ev.Began] = {}
    settling: dict[int, ev.Settling] = {}
    settled: dict[Ref, ev.Settling] = {}
    for event in events:
        if isinstance(event, ev.Began):
            began[event.topic, event.key, event.token] = event
        elif isinstance(event, ev.Settling):
            settling[event.call] = event
        elif isinstance(event, ev.Told) and event.ok and event.call in settling:
            ask = settling[event.call]
            settled[ask.topic, ask.key, ask.token] = ask
    by_lease: dict[Ref, list[Arrived]] = defaultdict(list)
    effects: dict[str, set[str]] = defaultdict(set)
    highest: dict[tuple[str, str], Token] = defaultdict(int)
    for one in arrivals:
        by_lease[one.topic, one.key, one.token].append(one)
        lease = began.get((one.topic, one.key, one.token))
        if lease is None or (lease.id, lease.attempt) != (one.id, one.attempt) or lease.at > one.at:
            wrong["unknown_delivery"].append((one, lease))
        if one.effect == APPLIED:
            if APPLIED in effects[one.id]:
                wrong["applied_twice"].append(one)
            if one.token < highest[one.topic, one.key]:
                wrong["stale_applied"].append(one)
        effects[one.id].add(one.effect)
        highest[one.topic, one.key] = max(one.token, highest[one.topic, one.key])
    for ref, end in settled.items():
        answered = [one for one in by_lease[ref] if one.acknowledged]
        if end.verdict is not OutcomeKind.DONE:
            # if the answer took longer, the instance may have given it up
            wrong["unheard"] += [(one, end) for one in answered if end.at - one.at < LEASE * 1e9]
            continue
        if not answered:
            wrong["unacknowledged"].append((end, by_lease[ref]))
        elif not effects[answered[0].id] & {APPLIED, STALE}:
            wrong["not_applied"].append((end, by_lease[ref]))
    return wrong


class Receiver:
    """A receiver on a free port of this machine, used as `async with`."""

    def __init__(self, seed: int) -> None:
        self.secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
        self.port = 0
        self.arrived: list[Arrived] = []
        self.bad: list[str] = []
        """Descriptions of bad deliveries."""
        self.behaved: Counter[str] = Counter()
        self._webhook = Webhook(self.secret)
        self._chance = random.Random(seed)
        self._applied: set[str] = set()
        self._highest: dict[tuple[str, str], int] = {}
        self._runner = web.ServerRunner(web.Server(self._receive), shutdown_timeout=_LONGEST)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._runner.cleanup()

    async def _receive(self, request: web.BaseRequest) -> web.StreamResponse:
        at, body, headers = time.monotonic_ns(), await request.read(), request.headers
        try:
            self._webhook.verify(body, dict(headers), json_parse=False)
            topic, key, id = headers["bide-topic"], headers["bide-key"], headers["webhook-id"]
            arrived = Arrived(topic, key, id, int(headers["bide-token"]), int(headers["bide-attempt"]), at)
            if msgspec.json.decode(body) != key:
                raise ValueError(f"{key} came with {body!r}")
        except Exception as error:  # noqa: BLE001 - any error in a delivery is a finding
            self.bad.append(f"{type(error).__name__}: {error}; {dict(headers)}")
            return web.Response(status=400)
        return await self._answer(request, arrived)

    async def _answer(self, request: web.BaseRequest, arrived: Arrived) -> web.StreamResponse:
        chance = self._chance.random()
        if arrived.topic == DYING and self._chance.random() < _DIES:
            return self._refused(arrived, 410)
        if chance < _FAILS:
            return self._refused(arrived, 500)
        arrived = replace(arrived, effect=self._effect(arrived))
        if chance < _FAILS + _HANGS_UP:
            self.behaved["hung up"] += 1
            self.arrived.append(replace(arrived, acknowledged=False))
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        self.arrived.append(arrived)
        if chance < _FAILS + _HANGS_UP + _SLOW:
            self.behaved["slow"] += 1
            await asyncio.sleep(self._chance.uniform(_LONGEST / 5, _LONGEST))
        return web.Response()

    def _refused(self, arrived: Arrived, status: int) -> web.Response:
        self.behaved[f"{status}"] += 1
        self.arrived.append(replace(arrived, effect=NONE, acknowledged=False))
        self._seen(arrived)
        return web.Response(status=status, text="not now")

    def _effect(self, arrived: Arrived) -> str:
        """Act as any receiver should: the token is a fence, the id makes a delivery idempotent."""
        highest = self._seen(arrived)
        if arrived.id in self._applied:
            return REPEATED
        if arrived.token < highest:
            return STALE
        self._applied.add(arrived.id)
        return APPLIED

    def _seen(self, arrived: Arrived) -> int:
        """Record the delivery's token; return the highest token of the key, including this one."""
        ref = (arrived.topic, arrived.key)
        highest = self._highest[ref] = max(arrived.token, self._highest.get(ref, 0))
        return highest
