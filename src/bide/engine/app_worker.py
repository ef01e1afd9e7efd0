"""A worker that opens its app, and closes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bide.core.records import Topic
from bide.engine.attached import attached
from bide.engine.client import Client
from bide.engine.tables import TableLoop
from bide.engine.worker import Observer, Worker
from bide.ports import Route


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
        self._worker: Worker | None = None

    async def __aenter__(self) -> Worker:
        app = self._app
        await app.open()
        try:
            routes, observe = attached(app.instruments, self._routes, self._observe)
            self._worker = Worker(
                app.store, routes, clock=app.clock, terms=app.terms, recorder=app.recorder, history=app.history,
                observe=observe, name=self._name, tables=() if self._tables is None else self._tables(),
            )  # fmt: skip
            await self._worker.start()
            for instrument in app.instruments:
                instrument.working(self._worker.wakes)
        except BaseException:
            await app.close()
            raise
        return self._worker

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._worker is not None
        try:
            await self._worker.stop()
        finally:
            await self._app.close()
