"""The measurements: pages by the clock, an open page by the processor time that it takes, a view by its bytes."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from statistics import median
from urllib.parse import quote, urlencode

import aiohttp
from bench.command import Figure
from bench.console_store import GROUP

from bide.cli.bench.server import stat
from bide.cli.bench.workers import BenchFault

PAGE_MS = 300.0
TIMELINE_MS = 500.0
OVERVIEW_PERCENT = 1.0
FIRST_VIEW_BYTES = 200_000
TIMES = 10
EVERY = 2.0
"""Seconds between two looks of an open overview, as the page has it."""
_REFERRED = re.compile(r'(?:href|src)="(/static/[^"]+)"')
_CSRF = re.compile(r'x-csrf-token": "([^"]+)"')


def pages(peak: int) -> Mapping[str, str]:
    """Their addresses by what is shown; `peak` is the second that most is planned for."""

    def tasks(**query: object) -> str:
        return f"/tasks?{urlencode(query)}"

    second = {"wake_from": _moment(peak), "wake_before": _moment(peak + 1_000)}
    task = f"/tasks/{quote('order.close')}/0000041"
    return {
        "overview": "/",
        "overview, live part": "/overview/live",
        **{f"timeline, {span}": f"/timeline?span={span}" for span in ("minute", "hour", "day", "month")},
        "timeline, one minute about the peak": f"/timeline?from={peak - 30_000}&until={peak + 30_000}",
        "timeline, day, one topic": "/timeline?span=day&topic=coupon.remind",
        "tasks": "/tasks",
        "tasks of a topic": tasks(topic="order.close"),
        "tasks, waiting": tasks(state="waiting"),
        "tasks, due": tasks(state="due"),
        "tasks, dead": tasks(state="dead"),
        "tasks of a topic, waiting": tasks(topic="order.close", state="waiting"),
        "tasks of a group": tasks(group=GROUP),
        "tasks of one second": tasks(**second),
        "tasks of a topic of one second": tasks(topic="coupon.remind", **second),
        "tasks with a key": tasks(key="0000041"),
        "task": task,
        "dead letters": "/dead",
        "topics": "/topics",
        "topic": "/topics/order.close",
        "changes": "/changes",
    }


def _moment(millis: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(millis // 1_000))


def session(url: str) -> aiohttp.ClientSession:
    """A browser's: it keeps cookies, also those of an address without a name."""
    return aiohttp.ClientSession(
        url, cookie_jar=aiohttp.CookieJar(unsafe=True), timeout=aiohttp.ClientTimeout(total=30.0)
    )


async def page_times(browser: aiohttp.ClientSession, name: str, path: str) -> list[Figure]:
    """Milliseconds to the last byte, `TIMES` times. Raises BenchFault for another status than 200."""
    times = []
    for number in range(TIMES):
        times.append(await _timed(name, lambda: browser.get(path, allow_redirects=False)))
        if number < TIMES - 1:
            await asyncio.sleep(0.3)
    return _figures(name, times)


async def preview_times(browser: aiohttp.ClientSession) -> list[Figure]:
    """The same of what is shown before all tasks of a topic are moved."""
    async with browser.get("/tasks") as reply:
        found = _CSRF.search(await reply.text())
    if found is None:
        raise BenchFault("the page of tasks has no token for its forms")
    form = {
        "csrf": found[1], "verb": "shift", "scope": "matching", "topic": "order.close", "state": "waiting", "by": "1h",
        "back": "/tasks",
    }  # fmt: skip
    name = "preview of a change to all of a topic"
    times = [await _timed(name, lambda: browser.post("/changes", data=form)) for _ in range(TIMES)]
    return _figures(name, times)


async def _timed(name: str, ask: Callable[[], AbstractAsyncContextManager[aiohttp.ClientResponse]]) -> float:
    began = time.perf_counter()
    async with ask() as reply:
        text = await reply.text()
        took = (time.perf_counter() - began) * 1_000
        if reply.status != 200:
            raise BenchFault(f"{name}: {reply.method} {reply.url} answered {reply.status}: {text[:300]}")
    return took


def _figures(name: str, times: list[float]) -> list[Figure]:
    most = TIMELINE_MS if name.startswith("timeline") else PAGE_MS
    return [
        Figure(f"page: {name}: first", times[0], "ms", most=most),
        Figure(f"page: {name}: median", median(times), "ms", most=most),
        Figure(f"page: {name}: worst", max(times), "ms", most=most),
    ]


async def open_overview(browser: aiohttp.ClientSession, pids: Mapping[str, int], seconds: float) -> list[Figure]:
    """Percent of one core of each of `pids`: an open overview, less what is used while nobody looks."""
    async with browser.get("/") as reply:
        await reply.read()
    await asyncio.sleep(5.0)
    idle = await _used(pids, seconds / 2, None)
    looked = await _used(pids, seconds, browser)
    figures = []
    for name in pids:
        figures.append(Figure(f"overview: {name}, nobody looks", idle[name], "%"))
        figures.append(Figure(f"overview: {name}, one looks", looked[name], "%"))
    cost = sum(looked[name] - idle[name] for name in pids)
    return [*figures, Figure("overview: what looking costs", cost, "%", most=OVERVIEW_PERCENT)]


async def _used(pids: Mapping[str, int], seconds: float, browser: aiohttp.ClientSession | None) -> dict[str, float]:
    before, began = _processor_times(pids), time.monotonic()
    while (left := began + seconds - time.monotonic()) > 0:
        if browser is not None:
            headers = {"hx-request": "true", "sec-fetch-site": "same-origin"}
            async with browser.get("/overview/live", headers=headers) as reply:
                if reply.status != 200:
                    raise BenchFault(f"the live part of the overview answered {reply.status}")
                await reply.read()
        await asyncio.sleep(min(EVERY, left))
    took, after = time.monotonic() - began, _processor_times(pids)
    return {name: (after[name] - before[name]) / took * 100 for name in pids}


def _processor_times(pids: Mapping[str, int]) -> dict[str, float]:
    return {name: stat(Path("/proc") / str(pid)).used for name, pid in pids.items()}


async def first_view(browser: aiohttp.ClientSession) -> list[Figure]:
    """Bytes of the first page and all that it refers to."""
    async with browser.get("/") as reply:
        html = await reply.text()
        total = len(html.encode()) + _header_bytes(reply)
    for path in dict.fromkeys(_REFERRED.findall(html)):
        async with browser.get(path) as reply:
            total += len(await reply.read()) + _header_bytes(reply)
    return [Figure("first view", total, "bytes", most=FIRST_VIEW_BYTES)]


def _header_bytes(reply: aiohttp.ClientResponse) -> int:
    return sum(len(name) + len(value) + 4 for name, value in reply.raw_headers)
