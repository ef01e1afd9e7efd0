"""The pages about the service itself: whether it lives, whether it is ready, and its metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec

from bide.service.callers import Verb
from bide.service.health import Health
from bide.service.metrics import Metrics
from bide.service.replies import Reply
from bide.service.requests import Request

OPEN = frozenset({"/healthz", "/readyz"})
"""For everybody: they say nothing about tasks."""

_encode = msgspec.json.encode


def pages_of(health: Health, metrics: Metrics) -> Mapping[tuple[str, str], Callable[[Request], Awaitable[Reply]]]:
    """By method and path."""

    async def live(request: Request) -> Reply:
        return Reply(200, b'{"status":"lives"}')

    async def ready(request: Request) -> Reply:
        found = await health.ready()
        return Reply(found.status, _encode(found.document()), headers={"cache-control": "no-store"})

    async def measured(request: Request) -> Reply:
        request.caller.check(Verb.METRICS, None)
        body, content_type = await metrics.exposition()
        return Reply(200, body, content_type)

    return {("GET", "/healthz"): live, ("GET", "/readyz"): ready, ("GET", "/metrics"): measured}
