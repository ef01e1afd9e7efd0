"""The application object: a store, the verbs, and the handlers of its topics."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any, Generic, TypeAlias, TypedDict, TypeVar, Unpack

import msgspec

from bide.core.answers import Answer
from bide.core.errors import BadInput, BadPayload, DuplicateHandler, SetupError
from bide.core.instants import At, Length, Millis, When, duration
from bide.core.names import check_name, check_topic, check_topics
from bide.core.outcomes import Outcome
from bide.core.records import NewTask, Topic
from bide.core.recurrence.rules import Cron, Every, Rule
from bide.core.retry import RetryPolicy, policy
from bide.core.table_source import TableSource
from bide.core.tasks import Task
from bide.engine.client import Client
from bide.engine.delivery.tables import TableLoop
from bide.engine.delivery.watch import Watch
from bide.engine.delivery.worker import AppWorker, Observer
from bide.engine.recurring import RecurrenceOptions, RuleEnded, check_options, default_key
from bide.engine.session import Session
from bide.engine.sync import SyncClient
from bide.engine.verbs import TaskOptions, refuse_unknown, whole_number
from bide.ports import Clock, DueRow, Route, Sink, Store, SystemClock, Table
from bide.settings import Settings
from bide.sinks.handlers import PythonHandler
from bide.wiring import engine_config, store_maker, tables_at, tracer, without_secrets

P = TypeVar("P")
Function: TypeAlias = Callable[[Task[P]], Awaitable[Outcome | None] | Outcome | None]
_THREADS = 32
"""The default number of threads of a plain-function handler."""
_MOST_CONNECTIONS = 1_000


class RouteOptions(TypedDict, total=False):
    """The delivery options of a topic; `Bide.handler` explains each."""

    retry: RetryPolicy | str | None
    timeout: Length | None
    losses: int | None
    keep_done: Length | None
    keep_cancelled: Length | None
    keep_dead: Length | None


class Handler(Generic[P]):
    """A handler and the verbs of its topic, typed by its payload. Calling it calls the function."""

    def __init__(self, app: Bide, topic: Topic, function: Callable[[Task[P]], Any], sink: PythonHandler) -> None:
        self.topic = topic
        self._app = app
        self._sink = sink
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", topic)
        self.__wrapped__: Callable[[Task[P]], Any] = function

    def __call__(self, task: Task[P]) -> Any:
        return self.__wrapped__(task)

    def new(self, payload: P, **options: Unpack[TaskOptions]) -> NewTask:
        """Make the task that `schedule` would send, for `schedule_many`. Raises BadInput, BadPayload. No I/O."""
        return self._app.new(self.topic, payload, **options)

    async def schedule(self, payload: P, **options: Unpack[TaskOptions]) -> Answer:
        """Schedule a task of this handler's topic. The type of its payload is checked here and by mypy.

        The keyword options, answers and errors are those of `Bide.schedule`. The options are key, group, delay or at,
        on_conflict, retry, deadline, headers, if_token, zone.
        """
        return await self._app.schedule(self.topic, payload, **options)

    async def schedule_many(self, tasks: Iterable[NewTask]) -> list[Answer]:
        """Schedule all of `tasks` (made by this handler's `new`) in one store call; see `Bide.schedule_many`."""
        batch = list(tasks)
        for task in batch:
            if task.topic != self.topic:
                raise BadInput("tasks", task.topic, f"tasks of {self.topic}; app.schedule_many takes any topic's")
        return await self._app.schedule_many(batch)

    def __repr__(self) -> str:
        return f"<Handler {self.topic} {self.__name__}>"

    async def reschedule(
        self, key: str, *, delay: Length | None = None, at: When | None = None, deadline: When | Length | None = None,
        if_token: int | None = None, zone: str | None = None,
    ) -> Answer:  # fmt: skip
        """See `Bide.reschedule`."""
        return await self._app.reschedule(
            self.topic, key, delay=delay, at=at, deadline=deadline, if_token=if_token, zone=zone
        )

    async def fire_now(self, key: str, *, if_token: int | None = None) -> Answer:
        """See `Bide.fire_now`."""
        return await self._app.fire_now(self.topic, key, if_token=if_token)

    async def cancel(self, key: str, *, if_token: int | None = None) -> Answer:
        """See `Bide.cancel`."""
        return await self._app.cancel(self.topic, key, if_token=if_token)

    async def redrive(self, key: str, *, delay: Length = "0s", if_token: int | None = None) -> Answer:
        """See `Bide.redrive`."""
        return await self._app.redrive(self.topic, key, delay=delay, if_token=if_token)

    async def get(self, key: str) -> Task[P] | None:
        """See `Bide.get`; the payload has the handler's type. Raises BadPayload if the stored payload has another."""
        task: Task[P] | None = await self._app.get(self.topic, key)
        if task is not None:
            self._sink.read(task)
        return task


class Bide(Client):
    """An app that schedules tasks for time T; until then they can be fired at once, moved or cancelled.

    `store` is a URL such as "sqlite:///shop.db" or "memory:", or a Store object; the default is BIDE_STORE. Each
    setting comes from a keyword (`Bide(url, lease="5s")`), else from the environment; or `settings` gives all of them.
    `clock` replaces the clock of this process and of the store, for tests. The event log records this app's changes
    under the name `actor`. Raises BadInput, MissingExtra. Use it with `async with app:`, or use `app.sync`.
    """

    def __init__(
        self,
        store: str | Store | None = None,
        *,
        settings: Settings | None = None,
        clock: Clock | None = None,
        actor: str | None = None,
        **overrides: Any,
    ) -> None:
        if settings is not None and overrides:
            raise BadInput("settings", settings, f"either a Settings, or single ones: {', '.join(overrides)}; not both")
        if not isinstance(settings, Settings | None):
            raise BadInput("settings", settings, "a Settings, as of Settings.from_env()")
        self.settings = Settings.from_env(**overrides) if settings is None else settings
        self.url = self.settings.store if store is None else store if isinstance(store, str) else f"<{store!r}>"
        """The store as given by the caller; a URL may contain a password."""
        make_store: Callable[[], Store]
        if store is None or isinstance(store, str):
            make_store = store_maker(self.url, self.settings, own_clock=clock is None)
        elif isinstance(store, Store):
            make_store = _always(store)
        else:
            raise BadInput("store", store, "a store URL or a Store")
        who = actor or self.settings.actor
        super().__init__(
            make_store, config=engine_config(self.settings), clock=clock,
            actor=None if who is None else check_name("actor", who), check_payload=self._check,
        )  # fmt: skip
        self.routes: dict[Topic, Route] = {}
        self._sinks: dict[Topic, PythonHandler] = {}
        self._dead_hooks: dict[Topic, list[Callable[[Task[Any]], Any]]] = {}
        self.watches: list[Watch] = []
        self.declared: dict[tuple[Topic, str], Callable[[], NewTask]] = {}
        """The recurring tasks that this program declares, by topic and key."""
        self.sync = SyncClient(self, self._clone)

    def handler(
        self, topic: str, *, concurrency: int | None = None, **how: Unpack[RouteOptions]
    ) -> Callable[[Function[P]], Handler[P]]:
        """Declare the function that handles `topic`. Raises BadInput, DuplicateHandler, SetupError.

        A coroutine function runs on the worker's loop, a plain one in a thread. It returns None or an `Outcome`, and
        may raise an `Outcome`; any other exception is a failure, which is retried.

        - `concurrency`: concurrent deliveries of this topic in one process. The default is the setting
          `topic_concurrency`, but at most 32 threads for a plain function.
        - `retry`: a retry policy, or the name of a preset.
        - `timeout`: a length after which a delivery fails; None for no limit.
        - `losses`: the number of successive leases that may end unsettled before the task is dead.
        - `keep_done`, `keep_cancelled`, `keep_dead`: lengths for which ended tasks of this topic are kept.
        """
        if callable(topic):
            raise SetupError(f'{topic!r}: write @app.handler("a.topic") above it, with the topic that it handles')
        topic, names = check_topic(topic), sys._getframe(1).f_locals
        route = self._route_of(topic, concurrency, how, "app.handler")

        def register(function: Function[P]) -> Handler[P]:
            if isinstance(function, Handler):  # stacked decorators: one function for several topics
                function = function.__wrapped__
            threads = concurrency or min(_THREADS, self.settings.topic_concurrency)
            sink = PythonHandler(function, threads=threads, names=names)
            slots = concurrency or (self.settings.topic_concurrency if sink.asynchronous else threads)
            self.routes[topic] = route(sink=sink, concurrency=slots)
            self._sinks[topic] = sink
            return Handler(self, topic, function, sink)

        return register

    def route(self, topic: str, sink: Sink, *, concurrency: int | None = None, **how: Unpack[RouteOptions]) -> None:
        """Send the deliveries of `topic` to `sink`, an object with `async deliver(task)`. `concurrency` is by default
        that of the sink, if it has one. Options and errors: see `handler`."""
        topic = check_topic(topic)
        if not callable(getattr(sink, "deliver", None)):
            raise BadInput("sink", sink, "an object with `async deliver(task)`")
        route = self._route_of(topic, concurrency, how, "app.route")
        slots = concurrency or getattr(sink, "concurrency", None) or self.settings.topic_concurrency
        self.routes[topic] = route(sink=sink, concurrency=slots)

    def recurs(
        self, rule: Rule, *, topic: str | None = None, payload: object = None, **options: Unpack[RecurrenceOptions]
    ) -> Callable[[Function[P]], Handler[P]]:
        """Declare a function whose task recurs by `rule`. A worker of the topic adds the task when it starts.

        Above a handler, or with the `topic` of a function that becomes one (by default the function's name). The
        options are those of `app.recurring.add`. A deploy with an unchanged rule moves nothing, and a changed rule
        moves the next occurrence. A task whose declaration was removed goes on until it is pruned, see `prune`.
        Raises BadInput, DuplicateHandler.
        """
        check_options(options, "an option of app.recurs")

        def register(function: Function[P]) -> Handler[P]:
            if isinstance(function, Handler) and topic in (None, function.topic):
                handled: Handler[P] = function
            else:
                handled = self.handler(topic or str(getattr(function, "__name__", "")))(function)
            about = handled.topic
            key = default_key(about) if (given := options.get("key")) is None else given
            if (about, key) in self.declared:
                raise DuplicateHandler(f"{about}/{key} recurs by another rule already; give this one another key=")
            new = partial(self.recurring.new, about, rule, payload, declared=True, **options)
            with suppress(RuleEnded):  # a program outlives its rules
                new()
            self.declared[about, key] = new
            return handled

        return register

    def cron(self, text: str, *, zone: str = "UTC", **how: Any) -> Callable[[Function[P]], Handler[P]]:
        """`recurs` with `Cron(text, zone=zone)`: `@app.cron("0 8 * * mon-fri", zone="Asia/Shanghai")`."""
        return self.recurs(Cron(text, zone=zone), **how)

    def every(self, length: Length, **how: Any) -> Callable[[Function[P]], Handler[P]]:
        """`recurs` with `Every(length)`: `@app.every("15m")`."""
        return self.recurs(Every(length), **how)

    async def orphaned(self) -> list[Task[Any]]:
        """The recurring tasks that a program declared and this one does not. O(the tasks of the store)."""
        return [
            task
            async for task in self.recurring.find()
            if task.recurrence is not None and task.recurrence.declared and (task.topic, task.key) not in self.declared
        ]

    async def prune(self) -> list[Answer]:
        """End the tasks of `orphaned`. Call it once no other version of the program runs."""
        return await self.cancel_many([(task.topic, task.key) for task in await self.orphaned()])

    def retain(
        self, topic: str, *, done: Length | None = None, cancelled: Length | None = None, dead: Length | None = None
    ) -> None:
        """Set the lengths for which ended tasks of `topic` are kept; None: as in the settings. Raises BadInput."""
        retentions = self.config.retentions.with_topic(
            check_topic(topic),
            done=None if done is None else duration(done, field="keep_done"),
            cancelled=None if cancelled is None else duration(cancelled, field="keep_cancelled"),
            dead=None if dead is None else duration(dead, field="keep_dead"),
        )
        self.config = msgspec.structs.replace(self.config, retentions=retentions)

    def _route_of(self, topic: str, concurrency: int | None, how: RouteOptions, by: str) -> Callable[..., Route]:
        """Makes the route of `topic` from its sink and slots; everything else is checked now."""
        known = RouteOptions.__annotations__
        refuse_unknown([name for name in how if name not in known], ["concurrency", *known], f"an option of {by}")
        if topic in self.routes:
            raise DuplicateHandler(f"topic {topic!r} has a handler already; give this one another topic")
        retries, limit, losses = policy(how.get("retry")), _limit_of(how.get("timeout")), how.get("losses")
        for field, count in (("concurrency", concurrency), ("losses", losses)):
            if count is not None:
                whole_number(field, count, 1, 1_000_000)
        self.retain(topic, done=how.get("keep_done"), cancelled=how.get("keep_cancelled"), dead=how.get("keep_dead"))
        return partial(
            Route, topic=topic, retry=retries, timeout=limit, losses=losses or self.settings.losses,
            on_dead=self._dead_hooks.setdefault(topic, []),
        )  # fmt: skip

    def watch(
        self,
        source: TableSource,
        *,
        topic: str | None = None,
        concurrency: int = 1,
        retry: RetryPolicy | str | None = None,
        timeout: Length | None = None,
    ) -> Watch:
        """Watch a table of your own: each due row gets the changes of `source` once. Raises BadInput.

        `@watch.handler` adds a function that is called inside the transaction of the changes, for up to `concurrency`
        rows concurrently in one process (1 to 1,000), each on its own connection. `retry` decides how long a row rests
        after a failure, and `timeout`, a length, ends a coroutine function as failed. With a `topic` each row becomes a
        task of that topic in the same transaction instead, with the row's id as key and its columns as payload; use
        this for slow handlers.
        """
        if not isinstance(source, TableSource):
            raise BadInput("source", source, "a TableSource")
        whole_number("concurrency", concurrency, 1, _MOST_CONNECTIONS)
        limit = _limit_of(timeout)
        if topic is not None and source.database is not None:
            raise BadInput("topic", topic, "none for a table of another database: one transaction cannot cover both")

        def new_task(row: DueRow, key: str) -> NewTask:
            assert topic is not None
            made = self.new(topic, row.columns, key=key, delay="0s")
            return msgspec.structs.replace(made, due=At(row.due))

        watch = Watch(
            source=source, name=source.table, concurrency=concurrency, retry=policy(retry), timeout=limit,
            topic=None if topic is None else check_topic(topic), task_of=new_task,
        )  # fmt: skip
        self.watches.append(watch)
        return watch

    def table_loops(self) -> list[TableLoop]:
        """Make the loops over the watched tables, not started; the app must be open. Raises BadInput, SetupError."""
        return [loop for watch in self.watches for loop in self.loops_of(watch)]

    def loops_of(self, watch: Watch) -> list[TableLoop]:
        """Make one loop for each table of `watch`."""
        tables = zip(watch.parts, self._tables(watch), strict=True)
        return [TableLoop(part, table, clock=self.clock, store=self.store) for part, table in tables]

    def _tables(self, watch: Watch) -> Sequence[Table]:
        source = watch.source
        if source.database is not None:
            own_clock = isinstance(self._own_clock, SystemClock)
            return tables_at(source.database, source, watch.concurrency, self.settings, own_clock=own_clock)
        if (tables := self.store.features.tables) is not None:
            return tables.tables(source, connections=watch.concurrency)
        raise SetupError(f"{watch}: this store holds no tables of yours; name a database: TableSource(database=URL)")

    def on_dead(self, topic: str) -> Callable[[Callable[[Task[Any]], Any]], Callable[[Task[Any]], Any]]:
        """Declare a function (plain or coroutine) that is called with each task of `topic` that dies. Raises BadInput.

        The worker that settled the task calls it once, after the death is stored. If that worker dies first, the
        function is not called; `find(state="dead")` still returns the task.
        """
        topic = check_topic(topic)

        def register(hook: Callable[[Task[Any]], Any]) -> Callable[[Task[Any]], Any]:
            self._dead_hooks.setdefault(topic, []).append(self._typed(topic, hook))
            return hook

        return register

    def _typed(self, topic: str, hook: Callable[[Task[Any]], Any]) -> Callable[[Task[Any]], Any]:
        """Wrap the hook so that the payload has the handler's type even if no handler ran, as after a deadline."""

        @wraps(hook)
        def typed(task: Task[Any]) -> Any:
            sink = self._sinks.get(topic)
            if sink is not None:
                with suppress(BadPayload):
                    sink.read(task)
            return hook(task)

        return typed

    def worker(
        self, *, topics: Collection[str] | None = None, observe: Observer | None = None, name: str | None = None
    ) -> AppWorker:
        """Run this app's handlers within `async with app.worker():`. It handles no signals; `bide work` does.

        With `topics` it works only on those; otherwise on all topics and the watched tables. `observe(record,
        settlement)` is called for each outcome that the store has accepted. `name` is the holder of the leases; the
        default is made of host, process and a random part. Raises BadInput, also for a topic without a handler.
        """
        name = None if name is None else check_name("name", name)
        only = [*self.routes] if topics is None else check_topics(topics)
        for topic in only:
            if topic not in self.routes:
                known = ", ".join(sorted(self.routes)) or "none"
                raise BadInput("topics", topic, f"topics that have a handler: {known}")
        chosen = {topic: self.routes[topic] for topic in only}
        tables = self.table_loops if topics is None else list[TableLoop]
        declared = [new for (topic, _), new in self.declared.items() if topic in chosen]
        return AppWorker(client=self, routes=chosen, tables=tables, declared=declared, observe=observe, name=name)

    def trace(self) -> None:
        """Trace this app's schedules and deliveries with OpenTelemetry from now on. Raises MissingExtra.

        Each schedule is a span whose context the task carries; each delivery is a span that links to it. Call it before
        a worker starts. Nothing is recorded unless the program sets up an OpenTelemetry SDK.
        """
        if self.carrier is None:
            tracing = tracer()
            self.carrier = tracing
            self.instruments.append(tracing)

    def _check(self, topic: str, payload: object) -> None:
        """Check a payload by the type that the topic's handler takes, if this app has it. Raises BadPayload."""
        sink = self._sinks.get(topic)
        if sink is not None:
            sink.check(payload)

    def __repr__(self) -> str:
        return f"<Bide {without_secrets(self.url)}, {len(self.routes)} topics>"

    async def _begin(self) -> Session:
        await self.sync.give_way()
        return await super()._begin()

    def _clone(self) -> Client:
        """Make a client for `app.sync`, used if the app is not open."""
        return Client(
            self._make_store, config=self.config, clock=self._own_clock, actor=self.actor, check_payload=self._check
        )


def _limit_of(timeout: Length | None) -> Millis | None:
    limit = None if timeout is None else duration(timeout, field="timeout")
    if limit == 0:
        raise BadInput("timeout", timeout, "a length above zero, or None for no limit")
    return limit


def _always(store: Store) -> Callable[[], Store]:
    return lambda: store
