"""The command: on which stores, and how the figures are shown."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from bench.console_pages import Figure, first_view, open_overview, page_times, pages, preview_times, session
from bench.console_store import fill
from bench.contest.server import Connection, ServerFault, server_at
from bench.http_processes import HttpFault, serving

from bide._version import __version__
from bide.core.errors import BideError


class Place(NamedTuple):
    """A store to be filled."""

    name: str
    url: str
    pids: dict[str, int]
    """The processes of its server, by name."""


def main(about: str | None) -> int:
    """Run it; the exit code: 1 if nothing could be measured, or a bar is not met."""
    parser = argparse.ArgumentParser(
        prog="bench/console.py", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shown = "sqlite: (a file of its own), redis: (a server of its own), redis://...; default: the first two"
    parser.add_argument("stores", nargs="*", default=["sqlite:", "redis:"], metavar="STORE_URL", help=shown)
    parser.add_argument("--tasks", type=_whole, default=1_000_000, help="so many wait (1000000)")
    parser.add_argument("--seconds", type=_whole, default=60, help="so long the overview stays open (60)")
    parser.add_argument("--json", action="store_true", help="one line of JSON a figure on stdout")
    given = parser.parse_args()
    try:
        return asyncio.run(_measure(given))
    except (HttpFault, ServerFault, BideError) as fault:
        _say(f"bench/console.py: {fault}")
        return 1
    except KeyboardInterrupt:
        _say("bench/console.py: stopped")
        return 130


def _whole(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("give a whole number above 0")
    return number


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


async def _measure(given: argparse.Namespace) -> int:
    good = True
    rows: list[tuple[str, Figure]] = []
    for store in given.stores:
        with tempfile.TemporaryDirectory(prefix="bide-console-", ignore_cleanup_errors=True) as folder:
            async with _place(store, Path(folder)) as place:
                async for figure in _figures(place, Path(folder), given.tasks, given.seconds):
                    good = good and figure.met
                    rows.append((place.name, figure))
                    if given.json:
                        _print(place.name, given.tasks, figure)
    _show_table(rows, to_stderr=given.json)
    return 0 if good else 1


@asynccontextmanager
async def _place(store: str, folder: Path) -> AsyncIterator[Place]:
    """Raises ServerFault, HttpFault."""
    name = store.partition(":")[0]
    if store == "sqlite:":
        yield Place(name, f"sqlite:///{folder}/tasks.db", {})
    elif name == "redis":
        async with server_at(None if store == "redis:" else store, folder) as server:
            try:
                yield Place(name, server.url, {"Redis": await _pid(server.url)})
            finally:
                if store != "redis:":
                    await server.empty()
    else:
        raise HttpFault(f"{store!r} is not accepted; give sqlite:, redis: or redis://host:port/database")


async def _pid(url: str) -> int:
    connection = await Connection.open(url)
    try:
        found = re.search(rb"process_id:(\d+)", await connection.call("INFO", "server"))
    finally:
        await connection.close()
    if found is None:
        raise ServerFault("the Redis server does not tell its process")
    return int(found[1])


async def _figures(place: Place, folder: Path, tasks: int, seconds: int) -> AsyncIterator[Figure]:
    _say(f"{place.name}: filling")
    began = time.monotonic()
    peak = await fill(place.url, tasks)
    yield Figure("filled", tasks / (time.monotonic() - began), "tasks/s")
    async with serving(place.url, folder) as instance, session(instance.url) as browser:
        for figure in await first_view(browser):
            yield figure
        for name, path in pages(peak).items():
            _say(f"{place.name}: {name}")
            for figure in await page_times(browser, name, path):
                yield figure
        for figure in await preview_times(browser):
            yield figure
        _say(f"{place.name}: an open overview, {seconds * 3 // 2} s")
        for figure in await open_overview(browser, {"bide serve": instance.pid, **place.pids}, seconds):
            yield figure


def _print(store: str, tasks: int, figure: Figure) -> None:
    line: dict[str, Any] = {"store": store, "tasks": tasks, "figure": figure.name, "value": figure.value}
    line["unit"] = figure.unit
    if figure.most is not None:
        line |= {"most": figure.most, "met": figure.met}
    line |= {"version": __version__, "python": platform.python_version(), "cpus": os.cpu_count() or 1}
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


def _show_table(rows: list[tuple[str, Figure]], *, to_stderr: bool) -> None:
    """Pages first, a line for each with its three figures; then the rest."""
    from rich.console import Console
    from rich.table import Table

    pages = Table("store", "page, ms", "first", "median", "worst", "at most", "", title="the console")
    rest = Table("store", "figure", "", "unit", "at most", "")
    for table, columns in ((pages, (2, 3, 4, 5)), (rest, (2, 4))):
        for column in columns:
            table.columns[column].justify = "right"
    of_page: list[Figure] = []
    for store, figure in rows:
        most = "" if figure.most is None else f"{figure.most:,.0f}"
        if figure.name.startswith("page: "):
            of_page.append(figure)
            if len(of_page) == 3:
                name = figure.name.removeprefix("page: ").rpartition(": ")[0]
                met = all(one.met for one in of_page)
                pages.add_row(store, name, *(_shown(one.value) for one in of_page), most, _met(met))
                of_page = []
        else:
            rest.add_row(store, figure.name, _shown(figure.value), figure.unit, most, _met(figure.met) if most else "")
    console = Console(stderr=to_stderr, highlight=False)
    console.print(pages)
    console.print(rest)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


def _met(met: bool) -> str:
    return "met" if met else "not met"
