"""The verbs on the caller's own connection: `app.using(connection).schedule(...)`, or around a block of verbs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from bide.core.errors import SetupError
from bide.core.instants import When
from bide.core.records import Filter, Found, NewTask, Page
from bide.core.tasks import Task
from bide.engine.arguments import filter_of
from bide.engine.client import Client
from bide.engine.joining import enter, leave, run_here
from bide.engine.session import Session
from bide.ports import Joined, JoinsTransaction

P = ParamSpec("P")
R = TypeVar("R")


class JoinedSession(Session):
    """The way to the store through one connection."""

    def __init__(self, session: Session, joined: Joined) -> None:
        self.__dict__.update(session.__dict__)
        self._own = joined

    def joined(self) -> Joined:
        return self._own


class JoinedClient(Client):
    """Every verb of the app, in the transaction that the connection is in; whoever began that commits.

    As `async with app.using(connection):` it lends the connection to every verb of the app and of its handlers that is
    awaited within the block. Nothing is opened and nothing closed.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.terms, self.clock, self.actor = client.terms, client.clock, client.actor
        self.carrier = client.carrier
        self._heeding = client._heeding
        self._opened = client._session
        self._joined: Joined

    def on(self, connection: object) -> Self:
        """Take part in the transaction of `connection`. Raises BadInput, SetupError."""
        store = self.store
        if not isinstance(store, JoinsTransaction):
            raise SetupError(
                f"{type(store).__name__} cannot take part in a transaction; sqlite:, postgresql: and mysql: can"
            )
        self._joined = store.using(connection)
        self._opened = JoinedSession(self._opened, self._joined)
        return self

    def enter(self, *, here: bool = False) -> None:
        """The verbs of everybody in this context take part, until it is left there; as often as one likes."""
        enter(self.store, self._joined, here=here)

    def leave(self) -> None:
        leave(self._joined)

    async def open(self) -> Self:
        return self

    async def close(self) -> None:
        """The app is the one to close."""

    async def __aenter__(self) -> Self:
        self.enter()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.leave()

    @property
    def _session(self) -> Session:
        self._client._session  # noqa: B018 - raises where the app is not open
        return self._opened

    def _check_payload(self, topic: str, payload: object) -> None:
        self._client._check_payload(topic, payload)


def _here(
    verb: Callable[Concatenate[Client, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[SyncJoinedClient, P], R]:
    """The blocking form of a verb, which runs in the caller's own thread."""

    @functools.wraps(verb)
    def call(self: SyncJoinedClient, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self:
            return run_here(verb(self._client, *args, **kwargs))

    return call


def found(
    find_page: Callable[[Filter, Page], Found],
    *,
    topic: str | None = None,
    state: str | None = None,
    group: str | None = None,
    wake_from: When | None = None,
    wake_before: When | None = None,
    page: int = 500,
) -> Iterator[Task[Any]]:
    """`Client.find` for synchronous code."""
    where, cursor = filter_of(topic, state, group, wake_from, wake_before), None
    while True:
        part = find_page(where, Page(limit=page, cursor=cursor))
        yield from map(Task, part.tasks)
        cursor = part.cursor
        if cursor is None:
            return


class SyncJoinedClient:
    """The same for synchronous code, on a synchronous connection: each verb runs in the thread that calls it.

    As `with app.sync.using(connection):` it lends the connection to every verb of `app.sync` within the block.
    """

    def __init__(self, client: JoinedClient) -> None:
        self._client = client

    schedule = _here(Client.schedule)
    schedule_new = _here(Client.schedule_new)
    schedule_many = _here(Client.schedule_many)
    reschedule = _here(Client.reschedule)
    reschedule_many = _here(Client.reschedule_many)
    fire_now = _here(Client.fire_now)
    fire_many = _here(Client.fire_many)
    cancel = _here(Client.cancel)
    cancel_many = _here(Client.cancel_many)
    cancel_group = _here(Client.cancel_group)
    shift = _here(Client.shift)
    redrive = _here(Client.redrive)
    redrive_many = _here(Client.redrive_many)
    pause = _here(Client.pause)
    resume = _here(Client.resume)
    paused = _here(Client.paused)
    get = _here(Client.get)
    get_many = _here(Client.get_many)
    find_page = _here(Client.find_page)

    def new(self, topic: str, payload: object = None, **options: Any) -> NewTask:
        """See `Client.new`."""
        return self._client.new(topic, payload, **options)

    def find(self, **where: Any) -> Iterator[Task[Any]]:
        """Every task that matches; see `Client.find`."""
        return found(self.find_page, **where)

    def __enter__(self) -> Self:
        self._client.enter(here=True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.leave()
