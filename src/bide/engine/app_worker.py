"""A worker that opens its app, and closes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from bide.core.records import Record, Settlement, Topic
from bide.engine.client import Client
from bide.engine.route_registry import RouteAnnouncer, settings_of
from bide.engine.tables import TableLoop
from bide.engine.worker import Observer, Worker
from bide.ports import Instrument, Route


class AppWorker:
    """A worker with its app: opens the app if it is not open, and lends itself as the running `Worker`."""

    def __init__(
        self,
        app: Client,
        routes: Mapping[Topic, Route],
        observe: Observer | None,
        name: str | None,
        *,
        tables: Callable[[], list[TableLoop]] | None,
    ) -> None:
        self._app = app
        self._tables = tables
        self._routes = dict(routes)
        self._observe = observe
        self._name = name
        self._entered: AsyncExitStack

    async def __aenter__(self) -> Worker:
        app = self._app
        async with AsyncExitStack() as entered:
            await app.open()
            entered.push_async_callback(app.close)
            routes, observe = attached(app.instruments, self._routes, self._observe)
            worker = Worker(
                app.store, routes, clock=app.clock, terms=app.terms, recorder=app.recorder, history=app.history,
                observe=observe, name=self._name, tables=() if self._tables is None else self._tables(),
            )  # fmt: skip
            entered.callback(app.heed(worker.held_back))
            entered.push_async_callback(worker.stop)  # also of what has started before something else could not
            await worker.start()
            settings = [settings_of(route, app.terms) for route in self._routes.values()]
            entered.push_async_callback(RouteAnnouncer(app.store, app.clock, app.terms, settings).end)
            for instrument in app.instruments:
                instrument.working(worker.wakes)
                for table in worker.tables:
                    instrument.watching(table.watch.name, table.stats)
            self._entered = entered.pop_all()
        return worker

    async def __aexit__(self, *exc_info: object) -> None:
        await self._entered.aclose()


def attached(
    instruments: Sequence[Instrument], routes: Mapping[Topic, Route], observe: Observer | None
) -> tuple[Mapping[Topic, Route], Observer | None]:
    """The routes and the observer of a worker, with the instruments attached to them."""
    for instrument in instruments:
        routes = {topic: instrument.route(route) for topic, route in routes.items()}
    observers = [one.observe for one in instruments] + ([] if observe is None else [observe])
    if len(observers) < 2:
        return routes, observers[0] if observers else None

    def observe_all(record: Record, told: Settlement) -> None:
        for one in observers:
            one(record, told)

    return routes, observe_all
