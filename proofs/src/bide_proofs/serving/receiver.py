"""The receiver of the webhooks: it checks, applies each effect once, and sometimes fails, hangs up, or is slow."""

from __future__ import annotations

import asyncio
import base64
import hmac
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import msgspec
from aiohttp import web

from bide_proofs.serving.lines import Arrived, Line, Wrong

INSTANCE_HEADER = "x-instance"
"""Each start of an instance has a number, which it sends along."""
_FAILS, _HANGS_UP, _SLOW = 0.03, 0.03, 0.01
_LONGEST = 1.0
"""Seconds that a slow answer takes at most."""
_TOLERANCE = 300
"""Seconds between the signature's time and now."""

Check = Callable[[bytes, Mapping[str, str]], None]
"""Raises ValueError, or an error of the library, if a delivery is not signed as it should be."""


class Receiver:
    """On a free port of 127.0.0.1. What it sees it says to `note`. Use it as `async with`."""

    def __init__(self, note: Callable[[Line], None], seed: int) -> None:
        self.secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
        self.port = 0
        self.busy = 0
        """Deliveries that are not answered yet."""
        self.behaved: Counter[str] = Counter()
        self.checked_by, self._check = _check_with(self.secret)
        self._note = note
        self._chance = random.Random(seed)
        self._applied: set[str] = set()
        self._highest: dict[str, int] = {}
        self._runner = web.ServerRunner(web.Server(self._receive), shutdown_timeout=_LONGEST)

    @property
    def place(self) -> str:
        """As an entry of an allow-list."""
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _receive(self, request: web.BaseRequest) -> web.StreamResponse:
        at, wall = time.monotonic_ns(), time.time_ns()
        self.busy += 1
        try:
            body, headers = await request.read(), request.headers
            try:
                self._check(body, headers)
                key, id, token = headers["bide-key"], headers["webhook-id"], int(headers["bide-token"])
                attempt, instance = int(headers["bide-attempt"]), int(headers[INSTANCE_HEADER])
                if body != payload_of(key):
                    raise ValueError(f"{key} came with {body!r}")
            except Exception as error:  # noqa: BLE001 - whatever is wrong with a delivery is what is looked for
                self._note(Wrong("bad_delivery", f"{type(error).__name__}: {error}; {dict(headers)}"))
                return web.Response(status=400)
            return await self._answer(request, Arrived(key, id, token, attempt, instance, at, wall))
        finally:
            self.busy -= 1

    async def _answer(self, request: web.BaseRequest, arrived: Arrived) -> web.StreamResponse:
        chance = self._chance.random()
        if chance < _FAILS:
            self.behaved["failed"] += 1
            self._note(msgspec.structs.replace(arrived, effect="none", acknowledged=False))
            self._seen(arrived)
            return web.Response(status=500, text="not now")
        effect = self._effect(arrived)
        if chance < _FAILS + _HANGS_UP:
            self.behaved["hung_up"] += 1
            self._note(msgspec.structs.replace(arrived, effect=effect, acknowledged=False))
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        self._note(msgspec.structs.replace(arrived, effect=effect))
        if chance < _FAILS + _HANGS_UP + _SLOW:
            self.behaved["slow"] += 1
            await asyncio.sleep(self._chance.uniform(_LONGEST / 5, _LONGEST))
        return web.Response()

    def _effect(self, arrived: Arrived) -> str:
        """What any receiver should do: the token is a fence, the id makes a delivery idempotent."""
        highest = self._seen(arrived)
        if arrived.id in self._applied:
            return "repeated"
        if arrived.token < highest:
            return "stale"
        self._applied.add(arrived.id)
        return "applied"

    def _seen(self, arrived: Arrived) -> int:
        """The highest token of the key, this delivery's included."""
        highest = self._highest[arrived.key] = max(arrived.token, self._highest.get(arrived.key, 0))
        return highest


def payload_of(key: str) -> bytes:
    """What a task of that key carries."""
    return b'{"key":"%s"}' % key.encode()


def _check_with(secret: str) -> tuple[str, Check]:
    """The official library, where it is installed."""
    try:
        from standardwebhooks import Webhook
    except ImportError:
        return "this module", own_check(secret)
    webhook = Webhook(secret)

    def check(body: bytes, headers: Mapping[str, str]) -> None:
        webhook.verify(body, dict(headers), json_parse=False)

    return "standardwebhooks", check


def own_check(secret: str) -> Check:
    """The same by hand, as standardwebhooks.com has it."""
    key = base64.b64decode(secret.removeprefix("whsec_"))

    def check(body: bytes, headers: Mapping[str, str]) -> None:
        id, timestamp = headers["webhook-id"], headers["webhook-timestamp"]
        if abs(time.time() - int(timestamp)) > _TOLERANCE:
            raise ValueError(f"webhook-timestamp {timestamp} is not of now")
        expected = base64.b64encode(hmac.digest(key, f"{id}.{timestamp}.".encode() + body, "sha256")).decode()
        given = headers["webhook-signature"].split(" ")
        if not any(hmac.compare_digest(f"v1,{expected}", one) for one in given):
            raise ValueError("no signature is right")

    return check
