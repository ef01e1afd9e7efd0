"""The receiver of the webhooks: it checks, applies each effect once, and sometimes fails, hangs up, or is slow."""

from __future__ import annotations

import asyncio
import base64
import random
import secrets
import time
from collections import Counter
from typing import Self

import msgspec
from aiohttp import web
from msgspec.structs import replace
from standardwebhooks import Webhook

from bide_proofs.kill_service.judge import APPLIED, NONE, REPEATED, STALE, Arrived
from bide_proofs.servers.process import HOST
from bide_proofs.torture.topics import DYING

_FAILS, _HANGS_UP, _SLOW = 0.03, 0.03, 0.01
_DIES = 0.5
"""The part of the deliveries of one topic that is answered with 410: the task shall be dead."""
_LONGEST = 1.0
"""Seconds that a slow answer takes at most."""


class Receiver:
    """On a free port of this machine. Use it as `async with`."""

    def __init__(self, seed: int) -> None:
        self.secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
        self.port = 0
        self.arrived: list[Arrived] = []
        self.bad: list[str] = []
        """Deliveries that were not as they should be, in words."""
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
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a delivery is what is looked for
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
        """Do as any receiver should: the token is a fence, the id makes a delivery idempotent."""
        highest = self._seen(arrived)
        if arrived.id in self._applied:
            return REPEATED
        if arrived.token < highest:
            return STALE
        self._applied.add(arrived.id)
        return APPLIED

    def _seen(self, arrived: Arrived) -> int:
        """The highest token of the key, this delivery's included."""
        ref = (arrived.topic, arrived.key)
        highest = self._highest[ref] = max(arrived.token, self._highest.get(ref, 0))
        return highest
