"""The first page: counts, lateness, workers and health."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from bide.core.instants import Millis
from bide.engine.registry import Channel
from bide.insight.minute_log import Flow
from bide.service.access import ANONYMOUS, Verb
from bide.service.console.pages import ConsoleContext, Page, PageRequest
from bide.service.health import Level
from bide.service.requests import Reply

_GOOD: Millis = 100
_WARN: Millis = 1_000
_HOST = re.compile(r"[A-Za-z0-9.\-]{1,253}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")
_WIDTH, _HEIGHT = 240, 40
"""The size of the chart of the last hour: four units for each minute."""


class OverviewPage(Page):
    """The page, and its live part, which an open page polls."""

    def __init__(self, context: ConsoleContext) -> None:
        self._shared = context
        self.routes = {
            ("GET", "/"): partial(self._shown, "overview.html"),
            ("GET", "/overview/live"): partial(self._shown, "overview_live.html"),
        }

    async def _shown(self, template: str, request: PageRequest) -> Reply:
        everything = request.caller.may(Verb.READ, None)
        request.caller.check_somewhere(Verb.READ)
        seen = await self._shared.overviews.get()
        overview = seen.overview(None if everything else lambda topic: request.caller.may(Verb.READ, topic))
        checks = [
            (request.t(check.name), check.level, request.t(check.sentence, **check.values))
            for check in (await self._shared.health.ready()).checks
        ]
        channel = self._shared.channel.look(notifies=self._shared.app.store.features.wakes is not None)
        checks.append((request.t("wake-ups"), *wake_up_status(request, channel)))
        return request.render(
            template, o=overview, checks=checks, late=grade(overview.minute), bars=bars(overview.by_minute),
            box=f"0 0 {_WIDTH} {_HEIGHT}", everything=everything,
            nothing=overview.empty and not any(overview.by_minute),  # now, and within the hour
            example=_example(request),
        )  # fmt: skip


def wake_up_status(request: PageRequest, channel: Channel) -> tuple[Level, str]:
    """How this instance learns of earlier wakes."""
    t, number = request.t, request.locale.number
    if not channel.notifies:
        return Level.OK, t("this store sends none: its workers poll")
    if channel.heard_ago is None:
        return Level.OK, t("none received here so far")
    heard = t("last received {length} ago", length=request.locale.length(round(channel.heard_ago * 1000)))
    if not channel.missed:
        return Level.OK, heard
    missed = t("{count} missed since the start", count=number(channel.missed))
    return (Level.WARNING if channel.missed_lately else Level.OK), f"{heard} · {missed}"


def grade(flow: Flow | None) -> str:
    """Grade the 99th percentile of the last minute's lateness."""
    late = None if flow is None else flow.deliveries.lateness(0.99)
    if late is None:
        return ""
    return "good" if late <= _GOOD else "warn" if late <= _WARN else "bad"


def bars(numbers: Sequence[int]) -> str:
    """A bar for each minute, as an SVG path of `_WIDTH` by `_HEIGHT`; empty if nothing happened."""
    most = max(numbers, default=0)
    if not most:
        return ""
    step = _WIDTH // len(numbers)
    heights = [max(1, round(number / most * _HEIGHT)) if number else 0 for number in numbers]
    return "".join(
        f"M{place * step} {_HEIGHT}v-{height}h{step - 1}v{height}z" for place, height in enumerate(heights) if height
    )


def _example(request: PageRequest) -> str:
    """A command that schedules a first task at this service."""
    http = request.http
    host = http.header(b"host") or ""
    if not _HOST.fullmatch(host):
        host = "127.0.0.1:8420"
    scheme = "https" if http.header(b"x-forwarded-proto") == "https" else "http"
    token = "" if request.caller.name == ANONYMOUS else " -H 'authorization: Bearer YOUR-TOKEN'"
    return (
        f"curl -X PUT {scheme}://{host}/v1/topics/hello/tasks/1{token} \\\n"
        f'  -H \'content-type: application/json\' -d \'{{"payload": {{"t": "hello"}}, "delay": "1m"}}\''
    )
