"""The workloads: each starts a service of its own on an empty store, and gives figures with what they should reach."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.command import Found
from bench.http_actors import payload_of
from bench.service import Actor, Instance, actor, serving, wrk

from bide.app import Bide
from bide.cli.bench.place import place_of
from bide.cli.bench.plan import in_batches
from bide.cli.bench.workers import BenchFault
from bide.core.instants import as_datetime
from bide.ports import HasSchema
from bide.settings import Settings
from bide.wiring import store_maker

TOPIC = "bench.http"
OTHER = "bench.http.other"
_BATCH = 500
_AHEAD = 1_000
_HANG = 30.0
_STALL = 0.5
_NANOSECONDS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The options, checked."""

    store: str
    seconds: float
    rate: float
    n: int
    polls: int
    uvloop: bool
    folder: Path
    say: Callable[[str], None]


@contextmanager
def _empty_store(plan: Plan) -> Iterator[str]:
    """The URL of a part of the store that is ours alone. Raises BenchFault where it is not."""
    with place_of(plan.store) as place:
        if not place.shared:
            raise BenchFault(f"{place.kind}: no other process can see such a store; give sqlite: or one on a server")
        if not place.owned:
            raise BenchFault(
                "there is something in the store already, and this would measure it too: name an empty one"
            )
        yield place.url


@asynccontextmanager
async def _service(plan: Plan, store: str, config: str = "", patience: float = 30.0) -> AsyncIterator[Instance]:
    opened = store_maker(store, Settings())()
    if isinstance(opened, HasSchema) and await opened.plan():
        await opened.migrate()
    async with serving(store, plan.folder, config, uvloop=plan.uvloop, patience=patience) as instance:
        plan.say(f"bide serve: pid {instance.pid}")
        yield instance


async def _stored(store: str, say: Callable[[str], None]) -> int:
    """How many there are, by looking at each: a tally stops counting at ten thousand."""
    say("looking whether everything that was acknowledged is in the store")
    async with Bide(store) as app:
        return len([True async for _ in app.find(topic=TOPIC, page=1_000)])


async def _with_wrk(plan: Plan, script: str, *words: str, connections: int) -> tuple[Mapping[str, Any], Found]:
    """A second to warm up, then the run that counts; everything that was acknowledged has to be in the store."""
    found = Found()
    with _empty_store(plan) as store:
        async with _service(plan, store) as instance:
            warm = await wrk(script, instance.url, *words, connections=connections, seconds=1)
            before = instance.used()
            outcome = await wrk(script, instance.url, *words, connections=connections, seconds=plan.seconds)
            busy = instance.used() - before
        for one in (warm, outcome):
            found.check("tasks that were answered with something else than created", one["others"], one["example"])
            found.check("requests without an answer", one["unanswered"])
        found.check("tasks that were acknowledged and are not in the store",
                    max(0, warm["created"] + outcome["created"] - await _stored(store, plan.say)))  # fmt: skip
    return {**outcome, "cpu_percent": 100 * busy / outcome["seconds"]}, found


async def single(plan: Plan) -> Found:
    """One PUT a task, from 64 connections."""
    outcome, found = await _with_wrk(plan, "single.lua", TOPIC, connections=64)
    found.add("schedules_per_s", outcome["created"] / outcome["seconds"], least=3_000)
    found.add("answer_p50_ms", outcome["p50_ms"])
    found.add("answer_p99_ms", outcome["p99_ms"])
    found.add("service_cpu_percent", outcome["cpu_percent"])
    return found


async def batch(plan: Plan) -> Found:
    """Batches of 500, from 4 connections."""
    outcome, found = await _with_wrk(plan, "batch.lua", TOPIC, str(_BATCH), connections=4)
    found.add("tasks_per_s", outcome["created"] / outcome["seconds"], least=30_000)
    found.add("answer_p50_ms", outcome["p50_ms"])
    found.add("answer_p99_ms", outcome["p99_ms"])
    found.add("service_cpu_percent", outcome["cpu_percent"])
    return found


async def _until(count: int, who: Actor, within: float) -> None:
    """Wait until so many were seen, or for so long."""
    ends = time.monotonic() + within
    while await who.ask("count") < count and time.monotonic() < ends:  # noqa: ASYNC110 - another process's
        await asyncio.sleep(0.2)


async def long_poll(plan: Plan) -> Found:
    """Tasks that are due a second ahead, to eight long-polls; lateness as the client sees it."""
    found, started = Found(), AsyncExitStack()
    with _empty_store(plan) as store:
        async with started:
            instance = await started.enter_async_context(_service(plan, store))
            consumer = await started.enter_async_context(actor("consume", url=instance.url, topic=TOPIC, polls=8))
            tasks = [{"topic": TOPIC, "headers": None}]
            pace = await started.enter_async_context(
                actor("pace", url=instance.url, tasks=tasks, rate=plan.rate, seconds=plan.seconds, ahead=_AHEAD)
            )
            scheduled = await pace.said("done", within=plan.seconds + 60)
            await _until(scheduled["count"], consumer, _AHEAD / 1_000 + 10)
            seen = await consumer.ask("report")
    _check_pace(found, scheduled)
    found.check("calls of the consumer that were refused", seen["refused"])
    found.check("tasks that never came", scheduled["count"] - seen["distinct"])
    found.check("tasks that came again", seen["count"] - seen["distinct"])
    found.check("tasks that were not settled", scheduled["count"] - seen["settled"])
    found.add("p50_ms", seen["p50_ms"])
    found.add("p99_ms", seen["p99_ms"], most=10)
    found.add("max_ms", seen["max_ms"])
    found.add("early", seen["early"], most=0)
    return found


def _check_pace(found: Found, scheduled: Mapping[str, Any]) -> None:
    found.check("schedules that were refused", scheduled["refused"], scheduled["example"])
    if scheduled["behind_ms"] > 100:
        found.faults.append(f"the process that schedules fell behind by {scheduled['behind_ms']} ms")


async def idle_polls(plan: Plan) -> Found:
    """Long-polls for which nothing is due, and what the service needs without them."""
    found = Found()
    with _empty_store(plan) as store:
        async with _service(plan, store) as instance:
            await asyncio.sleep(2)
            alone = await _cpu_percent(instance, min(plan.seconds, 10))
            async with actor("wait", url=instance.url, topic=TOPIC, polls=plan.polls) as polls:
                found.check("long-polls that were not opened", plan.polls - polls.began["open"])
                await asyncio.sleep(2)
                with_polls = await _cpu_percent(instance, plan.seconds)
                seen = await polls.ask("report")
    found.check("long-polls that were refused or broken", seen["refused"], seen["example"])
    found.check("long-polls that found something", seen["found"])
    found.add("cpu_percent", with_polls, most=2)
    found.add("cpu_percent_without", alone)
    found.add("renewed", seen["answered"])
    return found


async def _cpu_percent(instance: Instance, seconds: float) -> float:
    """Of one core."""
    used, began = instance.used(), time.monotonic()
    await asyncio.sleep(seconds)
    return 100 * (instance.used() - used) / (time.monotonic() - began)


def _config(plan: Plan, ports: Sequence[int], topics: Mapping[str, str]) -> str:
    """Webhooks to receivers on this machine, signed, all else as it comes."""
    file = plan.folder / "secrets"
    file.write_text(f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}\n", encoding="ascii")
    allow = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
    parts = [f"[webhooks]\nallow = [{allow}]"]
    parts += [f'[topics."{topic}"]\nwebhook = "{to}"\nsecrets_file = "{file}"' for topic, to in topics.items()]
    return "\n".join(parts) + "\n"


def _hook(port: int) -> str:
    return f"http://127.0.0.1:{port}/hook"


async def webhooks(plan: Plan) -> Found:
    """Tasks that are due at one instant, to one receiver that answers at once."""
    return await _backlog(plan, least=1_500, stall=0)


async def webhooks_stall(plan: Plan) -> Found:
    """The same to a receiver that stands still once, for half a second, after a fifth of them."""
    return await _backlog(plan, least=None, stall=_STALL)


async def _backlog(plan: Plan, *, least: float | None, stall: float) -> Found:
    found = Found()
    with _empty_store(plan) as store:
        async with actor("receive", hang=0, stall=stall, stall_after=plan.n // 5) as receiver:
            port = receiver.began["port"]
            async with _service(plan, store, _config(plan, [port], {TOPIC: _hook(port)})) as instance:
                lead = 2_000 + plan.n // 5
                due = time.time_ns() // _NANOSECONDS + lead
                await _fill(store, plan.n, due)
                left = due - time.time_ns() // _NANOSECONDS
                if left < 0:
                    raise BenchFault(
                        f"scheduling {plan.n} tasks took longer than {lead} ms, so that some were due already"
                    )
                before = instance.used()
                await asyncio.sleep(left / 1_000)
                await _until(plan.n, receiver, 10 + plan.n / 100)
                busy = instance.used() - before
                await asyncio.sleep(1)  # whatever comes twice
                seen = await receiver.ask("report")
    found.check("tasks that never came", plan.n - seen["distinct"])
    found.check("tasks that came again", seen["count"] - seen["distinct"])
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
    return await _hanging(plan, one_topic=False)


async def hanging_in_topic(plan: Plan) -> Found:
    """The same, but both receivers' tasks are of one topic, and each names its own URL."""
    return await _hanging(plan, one_topic=True)


async def _hanging(plan: Plan, *, one_topic: bool) -> Found:
    found = Found()
    without = await _beside(plan, found, 0.0, one_topic=one_topic)
    beside = await _beside(plan, found, _HANG, one_topic=one_topic)
    found.add("p99_ms_without", without["p99_ms"])
    found.add("p99_ms_with", beside["p99_ms"])
    found.add("p50_ms_without", without["p50_ms"])
    found.add("p50_ms_with", beside["p50_ms"])
    found.add("p99_ratio", beside["p99_ms"] / max(without["p99_ms"], 0.001))
    found.add("reached_the_hanging", beside["other"])
    found.add("early", without["early"] + beside["early"], most=0)
    return found


async def _beside(plan: Plan, found: Found, hang: float, *, one_topic: bool) -> Mapping[str, Any]:
    """The report of the healthy receiver, and how many requests the `other` got. Both get `rate` tasks a second."""
    started = AsyncExitStack()
    with _empty_store(plan) as store:
        async with started:
            healthy = await started.enter_async_context(actor("receive", hang=0))
            other = await started.enter_async_context(actor("receive", hang=hang))
            ports = [healthy.began["port"], other.began["port"]]
            tasks: list[dict[str, Any]]
            if one_topic:
                topics = {TOPIC: "per-task"}
                tasks = [{"topic": TOPIC, "headers": {"webhook": _hook(port)}} for port in ports]
            else:
                topics = {TOPIC: _hook(ports[0]), OTHER: _hook(ports[1])}
                tasks = [{"topic": topic} for topic in topics]
            config = _config(plan, ports, topics)
            instance = await started.enter_async_context(_service(plan, store, config, patience=1.0 if hang else 30.0))
            pace = await started.enter_async_context(
                actor("pace", url=instance.url, tasks=tasks, rate=plan.rate, seconds=plan.seconds, ahead=_AHEAD)
            )
            scheduled = await pace.said("done", within=plan.seconds + 60)
            await _until(scheduled["count"], healthy, _AHEAD / 1_000 + 10)
            seen, reached = await healthy.ask("report"), await other.ask("count")
    _check_pace(found, scheduled)
    found.check("tasks that never came to the healthy receiver", scheduled["count"] - seen["distinct"])
    found.check("tasks that came again to the healthy receiver", seen["count"] - seen["distinct"])
    return {**seen, "other": reached}


WORKLOADS: Mapping[str, Callable[[Plan], Awaitable[Found]]] = {
    "single": single,
    "batch": batch,
    "long_poll": long_poll,
    "idle_polls": idle_polls,
    "webhooks": webhooks,
    "webhooks_stall": webhooks_stall,
    "hanging": hanging,
    "hanging_in_topic": hanging_in_topic,
}
