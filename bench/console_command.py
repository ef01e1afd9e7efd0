"""The command: on which stores the console is measured, and how the figures are shown."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from bench.command import Figure, parser, print_line, run, say, show_table, whole
from bench.console_pages import first_view, open_overview, page_times, pages, preview_times, session
from bench.console_store import fill
from bench.contest.server import server_at
from bench.service import serving

from bide.cli.bench.workers import BenchFault

_PROG = "bench/console.py"
_PAGE = "page: "


class Place(NamedTuple):
    """A store to be filled."""

    name: str
    url: str
    pids: dict[str, int]
    """The processes of its server, by name."""


def main(about: str | None) -> int:
    """Run it; the exit code: 1 if nothing could be measured, or a bar is not met."""
    made = parser(_PROG, about)
    shown = "sqlite: (a file of its own), redis: (a server of its own), redis://...; default: the first two"
    made.add_argument("stores", nargs="*", default=["sqlite:", "redis:"], metavar="STORE_URL", help=shown)
    made.add_argument("--tasks", type=whole, default=1_000_000, help="so many wait (1000000)")
    made.add_argument("--seconds", type=whole, default=60, help="so long the overview stays open (60)")
    made.add_argument("--json", action="store_true", help="one line of JSON a figure on stdout")
    return run(_PROG, _measure(made.parse_args()))


async def _measure(given: argparse.Namespace) -> int:
    rows: list[tuple[str, Figure]] = []
    for store in given.stores:
        with tempfile.TemporaryDirectory(prefix="bide-console-", ignore_cleanup_errors=True) as folder:
            async with _place(store, Path(folder)) as place:
                async for figure in _figures(place, Path(folder), given.tasks, given.seconds):
                    rows.append((place.name, figure))
                    if given.json:
                        barred = {} if figure.most is None else {"most": figure.most, "met": figure.met}
                        print_line(
                            store=place.name, tasks=given.tasks, figure=figure.name, value=figure.value,
                            unit=figure.unit, **barred,
                        )  # fmt: skip
    _show(rows)
    return 0 if all(figure.met for _, figure in rows) else 1


@asynccontextmanager
async def _place(store: str, folder: Path) -> AsyncIterator[Place]:
    """Raises BenchFault."""
    name = store.partition(":")[0]
    if store == "sqlite:":
        yield Place(name, f"sqlite:///{folder}/tasks.db", {})
    elif name == "redis":
        async with server_at(None if store == "redis:" else store, folder) as server:
            try:
                yield Place(name, server.url, {"Redis": server.pid})
            finally:
                if store != "redis:":
                    await server.empty()
    else:
        raise BenchFault(f"{store!r} is not accepted; give sqlite:, redis: or redis://host:port/database")


async def _figures(place: Place, folder: Path, tasks: int, seconds: int) -> AsyncIterator[Figure]:
    say(f"{place.name}: filling")
    began = time.monotonic()
    peak = await fill(place.url, tasks)
    yield Figure("filled", tasks / (time.monotonic() - began), "tasks/s")
    async with serving(place.url, folder) as instance, session(instance.url) as browser:
        for figure in await first_view(browser):
            yield figure
        for name, path in pages(peak).items():
            say(f"{place.name}: {name}")
            for figure in await page_times(browser, name, path):
                yield figure
        for figure in await preview_times(browser):
            yield figure
        say(f"{place.name}: an open overview, {seconds * 3 // 2} s")
        for figure in await open_overview(browser, {"bide serve": instance.pid, **place.pids}, seconds):
            yield figure


def _show(rows: list[tuple[str, Figure]]) -> None:
    """Pages first, a line for each with its three figures; then the rest."""
    timed = groupby(
        ((store, figure) for store, figure in rows if figure.name.startswith(_PAGE)),
        key=lambda row: (row[0], row[1].name.removeprefix(_PAGE).rpartition(": ")[0]),
    )
    page_rows = [
        (store, name, *(figure.shown for figure in three), three[0].bar, _met(three))
        for (store, name), row in timed
        if (three := [figure for _, figure in row])
    ]
    columns = ("first", "median", "worst")
    show_table("the console", ("store", "page, ms", *columns, "bar", ""), page_rows, right=columns)
    rest = [
        (store, figure.name, figure.shown, figure.unit, figure.bar, _met([figure]) if figure.bar else "")
        for store, figure in rows
        if not figure.name.startswith(_PAGE)
    ]
    show_table("the rest", ("store", "figure", "value", "unit", "bar", ""), rest, right=("value",))


def _met(figures: list[Figure]) -> str:
    return "met" if all(figure.met for figure in figures) else "not met"
