"""The clients: `Client` opens a store; `JoinedClient` joins its caller's own transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from bide.core.errors import SetupError
from bide.engine.config import EngineConfig
from bide.engine.history import History, Recorder
from bide.engine.recurring import Recurring
from bide.engine.session import Session, SharedSession, enter, leave
from bide.engine.verbs import ClientVerbs
from bide.ports import Clock, Instrument, Store, SystemClock, TracePropagator


class _EveryVerb(ClientVerbs):
    @property
    def recurring(self) -> Recurring:
        """The verbs of recurring tasks."""
        return Recurring(self)


class Client(_EveryVerb):
    """The verbs on a store that this client opens. Use it with `async with`; while open it belongs to one event loop.

    `make_store` is called at each `open`. `check_payload(topic, payload)` raises BadPayload. For `actor` see
    `session.acting_as`.
    """

    def __init__(
        self,
        make_store: Callable[[], Store],
        *,
        config: EngineConfig | None = None,
        clock: Clock | None = None,
        actor: str | None = None,
        check_payload: Callable[[str, object], None] = lambda topic, payload: None,
    ) -> None:
        self.config = config or EngineConfig()
        self.clock: Clock = clock or SystemClock()
        self._own_clock = self.clock
        self.actor = actor
        self._check_payload = check_payload
        self.instruments: list[Instrument] = []
        self.carrier: TracePropagator | None = None
        self._make_store = make_store
        self._shared = SharedSession(self._begin)

    # --- open and close

    async def open(self) -> Self:
        """Open the store. It stays open until `close` was called as often as `open`. Raises SetupError, StoreError."""
        await self._shared.enter()
        return self

    async def close(self) -> None:
        """Wait for calls in progress, then close the store. Cancelling the caller does not stop this."""
        await self._shared.leave()
        if self._shared.session is None:
            self.clock = self._own_clock

    async def _begin(self) -> Session:
        store = self._make_store()
        for instrument in self.instruments:
            store = instrument.store(store)
        await store.open()
        clock = store.features.clock
        self.clock = (None if clock is None else clock.clock()) or self._own_clock
        return Session(store, self.clock, self.actor, history=self.config.history)

    def substitute(self, make_store: Callable[[], Store], clock: Clock) -> tuple[Callable[[], Store], Clock]:
        """Use another store and clock from the next `open` on; return the previous ones. For tests."""
        if self._shared.entered:
            raise SetupError("the app is open, so its store cannot be replaced")
        before = self._make_store, self.clock
        self._make_store, self.clock, self._own_clock = make_store, clock, clock
        return before

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def open_in(self) -> asyncio.AbstractEventLoop | None:
        """The event loop in which this client is open; None if it is closed."""
        return self._shared.loop

    @property
    def closed(self) -> bool:
        """False while this client opens, is open, or closes in a running event loop."""
        return self._shared.closed

    @property
    def recorder(self) -> Recorder:
        return self._session.recorder

    @property
    def history(self) -> History:
        return self._session.history

    def using(self, connection: object) -> JoinedClient:
        """The verbs in the caller's own transaction on `connection`; the caller commits.

        `await app.using(connection).schedule(...)`, or `async with app.using(connection):` around verbs of the app and
        of its handlers. Raises BadInput for a connection that the store cannot join; so does the first verb, which
        checks that the connection is to the store's own database. Raises SetupError if the store cannot share one.
        """
        return JoinedClient(self, connection)


class JoinedClient(_EveryVerb):
    """Every verb of the app, in the connection's current transaction. The caller began it and commits it.

    As `async with app.using(connection):` it applies to every verb of the app and its handlers within the block.
    """

    def __init__(self, client: Client, connection: object) -> None:
        self.config, self.clock, self.actor, self.carrier = client.config, client.clock, client.actor, client.carrier
        self._shared = client._shared
        self._check_payload = client._check_payload
        transactions = client.store.features.transactions
        if transactions is None:
            raise SetupError("this store cannot take part in a transaction; sqlite:, postgresql: and mysql: can")
        self._joined = transactions.using(connection)
        self._joined_session = client._session.within(self._joined)

    def enter(self, *, here: bool = False) -> None:
        """Make the verbs of this context join the transaction until `leave`. May be nested."""
        enter(self.store, self._joined, here=here)

    def leave(self) -> None:
        leave(self._joined)

    async def __aenter__(self) -> Self:
        self.enter()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.leave()

    @property
    def _session(self) -> Session:
        self._shared.checked()
        return self._joined_session
