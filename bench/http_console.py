"""The console measured: pages by the clock, and an open page by the processor time that it takes."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from statistics import median
from urllib.parse import quote, urlencode

import aiohttp
from bench.command import Found
from bench.service import Instance

from bide import Bide, NewTask
from bide.cli.bench.plan import in_batches
from bide.cli.bench.processes import BenchFault
from bide.core.instants import as_datetime
from bide_proofs.harness.command import progress

TOPICS = (
    "order.close", "order.remind", "order.archive", "coupon.remind", "post.publish", "payment.notify", "review.default",
    "meal.done", "subscription.renew", "event.remind",
)  # fmt: skip
GROUP = "event-summer"
"""The group of the first five hundred tasks of event.remind."""
_GROUPED = 500
_AHEAD = 24 * 3_600_000
_PAGE_MS = 300
_TIMELINE_MS = 500
_OVERVIEW_PERCENT = 1
_TIMES = 10
_EVERY = 2.0
"""Seconds between two requests of an open overview, as the page has it."""
_CSRF = re.compile(r'x-csrf-token": "([^"]+)"')


async def filled(store: str, tasks: int) -> int:
    """Fill it as a busy shop's is the evening before; the second in which most is due, in milliseconds.

    Tasks of ten topics are due over the next 24 hours, 4.1 % of them in that second.
    """
    progress(f"filling with {tasks:,} tasks")
    async with Bide(store) as app:
        start = app.clock.now() // 1_000 * 1_000
        peak = start + _AHEAD // 2
        for numbers in in_batches(range(tasks)):
            await app.schedule_many(list(_tasks(app, numbers, tasks * 41 // 1_000, start, peak)))
    return peak


def _tasks(app: Bide, numbers: Iterable[int], at_peak: int, start: int, peak: int) -> Iterator[NewTask]:
    for number in numbers:
        topic, due = TOPICS[number % len(TOPICS)], start + 60_000 + random.randrange(_AHEAD - 60_000)
        if number < at_peak:
            topic, due = "order.close" if number % 41 == 0 else "coupon.remind", peak + number % 1_000
        grouped = topic == "event.remind" and number < at_peak + _GROUPED * len(TOPICS)
        payload = {"number": number, "customer": f"c{number % 9973}"}
        key, group = f"{number:07d}", GROUP if grouped else None
        yield app.new(topic, payload, key=key, at=as_datetime(due), group=group)


def pages(peak: int) -> Mapping[str, str]:
    """Their addresses by what is shown; `peak` is the second that most is planned for."""

    def tasks(**query: object) -> str:
        return f"/tasks?{urlencode(query)}"

    second = {"wake_from": _moment(peak), "wake_before": _moment(peak + 1_000)}
    return {
        "overview": "/",
        "overview, live part": "/overview/live",
        **{f"timeline, {span}": f"/timeline?span={span}" for span in ("minute", "hour", "day", "month")},
        "timeline, one minute about the peak": f"/timeline?from={peak - 30_000}&until={peak + 30_000}",
        "timeline, day, one topic": "/timeline?span=day&topic=coupon.remind",
        "tasks": "/tasks",
        "tasks of a topic": tasks(topic="order.close"),
        **{f"tasks, {state}": tasks(state=state) for state in ("waiting", "due", "dead")},
        "tasks of a topic, waiting": tasks(topic="order.close", state="waiting"),
        "tasks of a group": tasks(group=GROUP),
        "tasks of one second": tasks(**second),
        "tasks of a topic of one second": tasks(topic="coupon.remind", **second),
        "tasks with a key": tasks(key="0000041"),
        "task": f"/tasks/{quote('order.close')}/0000041",
        "dead letters": "/dead",
        "topics": "/topics",
        "topic": "/topics/order.close",
        "changes": "/changes",
    }


def _moment(millis: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(millis // 1_000))


def _browser(instance: Instance) -> aiohttp.ClientSession:
    """It keeps cookies, also those of an address without a name."""
    jar = aiohttp.CookieJar(unsafe=True)
    return aiohttp.ClientSession(instance.url, cookie_jar=jar, timeout=aiohttp.ClientTimeout(total=30.0))


async def page_times(instance: Instance, found: Found, peak: int) -> None:
    """The median and the worst milliseconds to the last byte of each page, and of the preview of a large change."""
    async with _browser(instance) as browser:
        for name, path in pages(peak).items():
            await _ask_often(found, name, partial(browser.get, path, allow_redirects=False))
        async with browser.get("/tasks") as reply:
            token = _CSRF.search(await reply.text())
        if token is None:
            raise BenchFault("the page of tasks has no token for its forms")
        form = {
            "csrf": token[1], "verb": "shift", "scope": "matching", "topic": "order.close", "state": "waiting",
            "by": "1h", "back": "/tasks",
        }  # fmt: skip
        await _ask_often(found, "preview of a change to a topic", partial(browser.post, "/changes", data=form))


async def _ask_often(
    found: Found, name: str, ask: Callable[[], AbstractAsyncContextManager[aiohttp.ClientResponse]]
) -> None:
    """Raises BenchFault for another status than 200."""
    times = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        async with ask() as reply:
            text = await reply.text()
            times.append((time.perf_counter() - began) * 1_000)
            if reply.status != 200:
                raise BenchFault(f"{name}: {reply.method} {reply.url} answered {reply.status}: {text[:300]}")
        await asyncio.sleep(0.3)
    found.add(f"{name}: median_ms", median(times))
    found.add(f"{name}: worst_ms", max(times), most=_TIMELINE_MS if name.startswith("timeline") else _PAGE_MS)


async def open_overview(instance: Instance, found: Found, seconds: float) -> None:
    """Percent of one core that the service takes for an open overview, less what it takes while none is open."""
    await asyncio.sleep(5.0)
    alone = await instance.cpu_percent(seconds / 2)
    async with _browser(instance) as browser:
        looking = asyncio.create_task(_keep_open(browser))
        looked = await instance.cpu_percent(seconds)
        if looking.done():
            looking.result()
        looking.cancel()
    found.add("an open overview: cpu_percent", looked - alone, most=_OVERVIEW_PERCENT)
    found.add("without it: cpu_percent", alone)


async def _keep_open(browser: aiohttp.ClientSession) -> None:
    """Ask for what is new again and again, as the open page does. Raises BenchFault."""
    headers = {"hx-request": "true", "sec-fetch-site": "same-origin"}
    while True:
        async with browser.get("/overview/live", headers=headers) as reply:
            if reply.status != 200:
                raise BenchFault(f"the live part of the overview answered {reply.status}")
            await reply.read()
        await asyncio.sleep(_EVERY)
