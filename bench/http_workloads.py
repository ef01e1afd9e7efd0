"""The workloads: each starts a service of its own on an empty store, and gives figures with what they should reach.

Pages of the console are measured by the clock, and an open page by the processor time that it takes.
"""

from __future__ import annotations

import asyncio
import base64
import random
import re
import secrets
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from bench.command import Found
from bench.http_actors import payload_of
from bench.service import Instance, actor, serving, wrk

from bide import Bide, NewTask
from bide.core.instants import as_datetime
from bide_bench.plan import in_batches
from bide_bench.processes import BenchFault, Child
from bide_bench.worker import paced
from bide_proofs.harness.command import own_place, progress

TOPICS = (
    "order.close", "order.remind", "order.archive", "coupon.remind", "post.publish", "payment.notify", "review.default",
    "meal.done", "subscription.renew", "event.remind",
)  # fmt: skip
GROUP = "event-summer"
"""The group of the first five hundred tasks of event.remind."""
_GROUPED = 500
_CONSOLE_AHEAD = 24 * 3_600_000
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
        peak = start + _CONSOLE_AHEAD // 2
        for numbers in in_batches(range(tasks)):
            await app.schedule_many(list(_tasks(app, numbers, tasks * 41 // 1_000, start, peak)))
    return peak


def _tasks(app: Bide, numbers: Iterable[int], at_peak: int, start: int, peak: int) -> Iterator[NewTask]:
    for number in numbers:
        topic, due = TOPICS[number % len(TOPICS)], start + 60_000 + random.randrange(_CONSOLE_AHEAD - 60_000)
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


TOPIC = "bench.http"
OTHER = "bench.http.other"
_BATCH = 500
_AHEAD = 1_000
_HANG = 30.0
_STALL = 0.5
_NANOSECONDS = 1_000_000


class Plan(Namespace):
    """The options of the command, and the folder of a run."""

    store: str
    only: list[str] | None
    seconds: float
    rate: float
    n: int
    polls: int
    tasks: int
    rounds: int
    uvloop: bool
    folder: Path


@asynccontextmanager
async def _service(plan: Plan, config: str = "", *, patience: float = 30.0) -> AsyncIterator[Instance]:
    async with (
        own_place(plan.store) as place,
        serving(place.url, plan.folder, config, uvloop=plan.uvloop, patience=patience) as instance,
    ):
        progress(f"bide serve: pid {instance.pid}")
        yield instance


async def _stored(store: str) -> int:
    """The number of tasks, by reading each: a tally stops counting at ten thousand."""
    progress("looking whether everything that was acknowledged is in the store")
    async with Bide(store) as app:
        return len([True async for _ in app.find(topic=TOPIC, page=1_000)])


async def _with_wrk(plan: Plan, script: str, *words: str, connections: int, rate: str, least: float) -> Found:
    """A second to warm up, then the run that counts; everything that was acknowledged has to be in the store."""
    found = Found()
    async with _service(plan) as instance:
        warm = await wrk(script, instance.url, TOPIC, *words, connections=connections, seconds=1)
        before = instance.used()
        outcome = await wrk(script, instance.url, TOPIC, *words, connections=connections, seconds=plan.seconds)
        busy = instance.used() - before
        missing = warm["created"] + outcome["created"] - await _stored(instance.store)
    for one in (warm, outcome):
        found.check("tasks that were answered with something else than created", one["others"], one["example"])
        found.check("requests without an answer", one["unanswered"])
    found.check("tasks that were acknowledged and are not in the store", max(0, missing))
    found.add(rate, outcome["created"] / outcome["seconds"], least=least)
    found.add("answer_p50_ms", outcome["p50_ms"])
    found.add("answer_p99_ms", outcome["p99_ms"])
    found.add("service_cpu_percent", 100 * busy / outcome["seconds"])
    return found


async def single(plan: Plan) -> Found:
    """One PUT a task, from 64 connections."""
    return await _with_wrk(plan, "single.lua", connections=64, rate="schedules_per_s", least=3_000)


async def batch(plan: Plan) -> Found:
    """Batches of 500, from 4 connections."""
    return await _with_wrk(plan, "batch.lua", str(_BATCH), connections=4, rate="tasks_per_s", least=30_000)


async def _pace(plan: Plan, instance: Instance, found: Found, *topics: str) -> int:
    """Schedule a task of each topic at the plan's rate, due a second later; how many times."""
    count, behind = round(plan.seconds * plan.rate), 0.0
    calls = []
    async with Bide(instance.url) as app:
        begun = time.monotonic()
        async for number in paced(count, plan.rate):
            behind = max(behind, time.monotonic() - begun - number / plan.rate)
            due = time.time_ns() // _NANOSECONDS + _AHEAD
            for topic in topics:
                call = app.schedule(topic, payload_of(number, due), at=as_datetime(due))
                calls.append(asyncio.create_task(call))
        answers = await asyncio.gather(*calls)
    found.check("schedules that were refused", sum(not answer.ok for answer in answers))
    if behind > 0.1:
        found.faults.append(f"the process that schedules fell behind by {behind * 1000:.0f} ms")
    return count


async def _until(count: int, who: Child, within: float) -> None:
    """Wait until so many were seen, or for so long."""
    ends = time.monotonic() + within
    while await who.ask("count") < count and time.monotonic() < ends:  # noqa: ASYNC110 - another process's
        await asyncio.sleep(0.2)


def _check_all_came(found: Found, count: int, seen: Mapping[str, Any]) -> None:
    found.check("tasks that never came", count - seen["distinct"])
    found.check("tasks that came again", seen["count"] - seen["distinct"])


async def long_poll(plan: Plan) -> Found:
    """Tasks that are due a second ahead, to eight long-polls; lateness as the client sees it."""
    found = Found()
    async with _service(plan) as instance, actor("poll", url=instance.url, topic=TOPIC, polls=8) as consumer:
        count = await _pace(plan, instance, found, TOPIC)
        await _until(count, consumer, _AHEAD / 1_000 + 10)
        seen = await consumer.ask("report")
    found.check("calls of the consumer that were refused", seen["refused"], seen["example"])
    _check_all_came(found, count, seen)
    found.check("tasks that were not settled", count - seen["settled"])
    found.add("p50_ms", seen["p50_ms"])
    found.add("p99_ms", seen["p99_ms"], most=10)
    found.add("max_ms", seen["max_ms"])
    found.add("early", seen["early"], most=0)
    return found


async def idle_polls(plan: Plan) -> Found:
    """Long-polls for which nothing is due, and what the service needs without them."""
    found = Found()
    async with _service(plan) as instance:
        await asyncio.sleep(2)
        alone = await instance.cpu_percent(min(plan.seconds, 10))
        async with actor("poll", url=instance.url, topic=TOPIC, polls=plan.polls) as polls:
            await asyncio.sleep(2)
            with_polls = await instance.cpu_percent(plan.seconds)
            seen = await polls.ask("report")
    found.check("long-polls that were refused or broken", seen["refused"], seen["example"])
    found.check("long-polls that found something", seen["count"])
    found.add("cpu_percent", with_polls, most=2)
    found.add("cpu_percent_without", alone)
    found.add("renewed", seen["answered"])
    return found


def _config(plan: Plan, receivers: Mapping[str, str]) -> str:
    """Webhooks by topic to receivers on this machine, signed, all else as it comes."""
    file = plan.folder / "secrets"
    file.write_text(f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}\n", encoding="ascii")
    parts = ['[webhooks]\nallow = ["127.0.0.0/8"]']
    parts += [f'[topics."{topic}"]\nwebhook = "{to}"\nsecrets_file = "{file}"' for topic, to in receivers.items()]
    return "\n".join(parts) + "\n"


def _hook(receiver: Child) -> str:
    return f"http://127.0.0.1:{receiver.began['port']}/hook"


async def webhooks(plan: Plan) -> Found:
    """Tasks that are due at one instant, to one receiver that answers at once."""
    return await _backlog(plan, least=1_500, stall=0)


async def webhooks_stall(plan: Plan) -> Found:
    """The same to a receiver that stands still once, for half a second, after a fifth of them."""
    return await _backlog(plan, least=None, stall=_STALL)


async def _backlog(plan: Plan, *, least: float | None, stall: float) -> Found:
    found = Found()
    async with (
        actor("receive", stall=stall, stall_after=plan.n // 5) as receiver,
        _service(plan, _config(plan, {TOPIC: _hook(receiver)})) as instance,
    ):
        lead = 2_000 + plan.n // 5
        due = time.time_ns() // _NANOSECONDS + lead
        await _fill(instance.store, plan.n, due)
        left = due - time.time_ns() // _NANOSECONDS
        if left < 0:
            raise BenchFault(f"scheduling {plan.n} tasks took longer than {lead} ms, so that some were due already")
        before = instance.used()
        await asyncio.sleep(left / 1_000)
        await _until(plan.n, receiver, 10 + plan.n / 100)
        busy = instance.used() - before
        await asyncio.sleep(1)  # whatever comes twice
        seen = await receiver.ask("report")
    _check_all_came(found, plan.n, seen)
    lasted = max(1, seen["last_ns"] - due * _NANOSECONDS) / 1e9
    found.add("deliveries_per_s", seen["count"] / lasted, least=least)
    found.add("half_after_ms", seen["p50_ms"])
    found.add("99_percent_after_ms", seen["p99_ms"])
    found.add("last_after_ms", seen["max_ms"])
    found.add("service_cpu_percent", 100 * busy / lasted)
    found.add("early", seen["early"], most=0)
    return found


async def _fill(store: str, count: int, due: int) -> None:
    """So many tasks, due at that millisecond, put into the store beside the service."""
    async with Bide(store) as app:
        tasks = [app.new(TOPIC, payload_of(number, due), at=as_datetime(due)) for number in range(count)]
        for some in in_batches(tasks):
            await app.schedule_many(some)


async def hanging(plan: Plan) -> Found:
    """Two receivers with a topic each; the lateness of the one, while the other answers, and while it hangs."""
    found = Found()
    without = await _beside(plan, found, 0.0)
    beside = await _beside(plan, found, _HANG)
    found.add("p99_ms_without", without["p99_ms"])
    found.add("p99_ms_with", beside["p99_ms"])
    found.add("p50_ms_without", without["p50_ms"])
    found.add("p50_ms_with", beside["p50_ms"])
    found.add("p99_ratio", beside["p99_ms"] / max(without["p99_ms"], 0.001))
    found.add("reached_the_hanging", beside["other"])
    found.add("early", without["early"] + beside["early"], most=0)
    return found


async def _beside(plan: Plan, found: Found, hang: float) -> Mapping[str, Any]:
    """The report of the healthy receiver, and how many requests the `other` got. Both get `rate` tasks a second."""
    async with (
        actor("receive") as healthy,
        actor("receive", hang=hang) as other,
        _service(
            plan, _config(plan, {TOPIC: _hook(healthy), OTHER: _hook(other)}), patience=1.0 if hang else 30.0
        ) as instance,
    ):
        count = await _pace(plan, instance, found, TOPIC, OTHER)
        await _until(count, healthy, _AHEAD / 1_000 + 10)
        seen, reached = await healthy.ask("report"), await other.ask("count")
    _check_all_came(found, count, seen)
    return {**seen, "other": reached}


async def console(plan: Plan) -> Found:
    """Each page ten times at `tasks` tasks, and what an open overview costs."""
    found = Found()
    async with own_place(plan.store) as place:
        peak = await filled(place.url, plan.tasks)
        async with serving(place.url, plan.folder, uvloop=plan.uvloop) as instance:
            await page_times(instance, found, peak)
            await open_overview(instance, found, plan.seconds)
    return found


WORKLOADS: Mapping[str, Callable[[Plan], Awaitable[Found]]] = {
    workload.__name__: workload
    for workload in (single, batch, long_poll, idle_polls, webhooks, webhooks_stall, hanging, console)
}
