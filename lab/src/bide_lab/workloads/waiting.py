"""Workloads in which little or nothing is due: what waiting costs, processes and servers, and what a verb costs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from bide_bench.processes import resident_bytes, spent_by_family
from bide_lab.figures import Figures
from bide_lab.processes import Step
from bide_lab.strategy import VERBS, Strategy, now
from bide_lab.workload import HOUR, Trial, batches, keys_of, processor_share, workload


@workload(for_all=True, relayed=True)
async def idle(trial: Trial, *, quick: bool) -> Figures:
    """tasks due in an hour: what it costs to wait.

    Processor time of clients and servers, messages, and memory for each task.
    """
    count, seconds = (10_000, 1.5) if quick else (100_000, 5.0)
    count = min(count, trial.strategy.bears)
    client, _ = await trial.ready()
    # the consumers, or the servers, hold what waits; a client beside them holds nothing
    holders = trial.processes if trial.strategy.in_process else trial.processes[:-1]
    await asyncio.sleep(0.5)
    urls = trial.owner.setting.urls
    servers = servers_of(urls)
    empty, bytes_before = [await one.usage(collect=True) for one in holders], await held_by(servers, urls)
    took = (await client.order("fill", count=count, ahead=HOUR))["seconds"]
    await asyncio.sleep(1.5)  # what was begun is finished, on the servers too
    bytes_after, filled = await held_by(servers, urls), [await one.usage(collect=True) for one in holders]
    before, cpu_before = [await one.usage() for one in holders], spent_by(servers)
    sent_before, began = trial.to_servers, time.monotonic()
    await asyncio.sleep(seconds)
    after, cpu_after = [await one.usage() for one in holders], spent_by(servers)
    sent, lasted = trial.to_servers - sent_before, time.monotonic() - began
    await trial.unharmed()
    figures = trial.judged()
    figures.scheduled = count
    figures.client_cpu_pct = processor_share(before, after)
    grown = sum(one["resident"] - other["resident"] for one, other in zip(filled, empty, strict=True))
    figures.client_bytes_per_task = round(max(0, grown) / count, 1)
    figures.threads = sum(used["threads"] for used in after)
    figures.counts = await trial.counts()
    if not trial.relays:
        figures.schedules_per_s = round(count / took, 1)
        return figures
    figures.idle_trips_per_s = round(sent / lasted, 2)
    if cpu_before is not None and cpu_after is not None:
        figures.server_cpu_pct = round((cpu_after - cpu_before) / lasted * 100, 3)
    if bytes_before is not None and bytes_after is not None:
        figures.server_bytes_per_task = round(max(0, bytes_after - bytes_before) / count, 1)
    return figures


def _uncounted(strategy: type[Strategy]) -> str:
    if strategy.direct:  # nothing counts what goes past the relays, and nothing counted is not nothing sent
        return "its connections cannot be relayed, so its messages are not counted"
    return "" if strategy.needs else "it asks no server"


@workload(for_all=True, relayed=True, senseless=_uncounted)
async def trips(trial: Trial, *, quick: bool) -> Figures:
    """one task at a time, from schedule to done: messages to the servers.

    Each is fired before the next is scheduled.
    """
    ahead, seconds = 50, 1.0
    each = ahead / 1000 + trial.strategy.period + trial.setting.span(trial.strategy.precision)
    count = max(5, min(20 if quick else 100, int((5 if quick else 20) / each)))
    client, _ = await trial.ready()
    await asyncio.sleep(0.5)
    sent = trial.to_servers
    await asyncio.sleep(seconds)
    at_rest = (trial.to_servers - sent) / seconds
    sent, began = trial.to_servers, time.monotonic()
    for number, key in enumerate(keys_of(count)):
        await client.play(now(), [Step(0, "schedule", [(key, ahead)])])
        await trial.until_fired(number + 1, by=time.time() + ahead / 1000 + trial.patience)
    sent, lasted = trial.to_servers - sent, time.monotonic() - began
    await trial.unharmed()
    figures = trial.judged()
    figures.idle_trips_per_s = round(at_rest, 2)
    figures.trips_per_task = round(max(0.0, sent - at_rest * lasted) / count, 2)
    return figures


@workload(for_all=True)
async def verbs(trial: Trial, *, quick: bool) -> Figures:
    """one call at a time: microseconds of each verb."""
    count = 50 if quick else 200
    client, _ = await trial.ready()
    costs: dict[str, float | str] = dict(trial.strategy.cannot)
    for verb in [verb for verb in VERBS if verb not in trial.strategy.cannot]:
        keys = keys_of(count, "f" if verb == "fire_now" else "k")
        if verb == "fire_now":  # of tasks that are there, and nobody has touched
            await client.play(now(), batches([(key, HOUR) for key in keys]))
        due = {"schedule": HOUR, "reschedule": 2 * HOUR}.get(verb)
        await client.play(now(), [Step(0, verb, [(key, due)]) for key in keys], callers=1)
        costs[verb] = round(median(
            (call.answered - call.begun) / 1000
            for call in trial.written()[0][-count:] if call.verb == verb and call.answered is not None
        ), 1)  # fmt: skip
    end = time.time()
    await trial.until_fired(0 if "fire_now" in trial.strategy.cannot else count, by=end + trial.patience)
    figures = trial.judged(until=end)
    figures.verbs = costs
    return figures


_LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def spent_by(servers: Sequence[Path] | None) -> float | None:
    """Seconds of processor time so far, of the servers and their children; None where one is not to be seen."""
    try:
        return None if servers is None else sum(map(spent_by_family, servers))
    except OSError:
        return None


async def held_by(servers: Sequence[Path] | None, urls: Mapping[str, str]) -> int | None:
    """Bytes that they hold: in memory, or for a database in its tables; None where one does not say."""
    if set(urls) == {"rabbitmq"}:
        return None if servers is None else sum(map(resident_bytes, servers))
    sizes = [await _size(kind, url) for kind, url in urls.items()]
    return None if None in sizes else sum(filter(None, sizes))


async def _size(kind: str, url: str) -> int | None:
    """By the server's own account."""
    if kind == "redis":
        from redis.asyncio import Redis

        async with Redis.from_url(url) as redis:
            return int((await redis.info("memory"))["used_memory"])
    if kind == "postgres":
        import asyncpg

        connection = await asyncpg.connect(url)
        try:
            return int(await connection.fetchval("SELECT pg_database_size(current_database())"))
        finally:
            await connection.close()
    return None


def servers_of(urls: Mapping[str, str]) -> list[Path] | None:
    """The processes that listen on the ports of the URLs, as `/proc/7`; the eldest, where several share the socket.

    None where one is not to be seen: on another machine, or another user's.
    """
    ports = {port for url in urls.values() if (port := urlsplit(url).port)}
    sockets: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for words in map(str.split, Path(table).read_text(encoding="ascii").splitlines()[1:]):
                if words[3] == _LISTENS:
                    sockets[f"socket:[{words[9]}]"] = int(words[1].rpartition(":")[2], 16)
    found: dict[int, Path] = {}
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda place: int(place.name)):
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    found.setdefault(sockets.get(os.readlink(descriptor), 0), process)
    return sorted({found[port] for port in ports}) if ports <= found.keys() else None
