"""The clients: `Client` opens a store; `JoinedClient` takes part in its caller's own transaction."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any, Self

from bide.core.errors import NotOpen, SetupError
from bide.engine.config import EngineConfig
from bide.engine.history import History
from bide.engine.recorder import Recorder
from bide.engine.session import Session, running_loop
from bide.engine.transaction_context import enter, leave
from bide.engine.verbs import ClientVerbs
from bide.ports import Clock, Instrument, Store, SystemClock, TracePropagator

_ELSEWHERE = "this app is open in another event loop; give each loop an app of its own, or use app.sync"


class Client(ClientVerbs):
    """The verbs over a store that it opens. Use it as `async with`; while open it belongs to one event loop.

    `make_store` is called at each `open`. `check_payload(topic, payload)` raises BadPayload. For `actor` see
    `recorder.acting_as`.
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
        """Open the store; it is open until `close` was called as often. Raises SetupError, StoreError."""
        await self._shared.enter()
        return self

    async def close(self) -> None:
        """Wait for calls under way, then close the store. A caller that is cancelled does not stop it."""
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
        """From the next `open` on, use another store and clock; returns the ones from before. For tests."""
        if self._shared.entered:
            raise SetupError("the app is open: its store cannot be exchanged under it")
        before = self._make_store, self.clock
        self._make_store, self.clock, self._own_clock = make_store, clock, clock
        return before

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def open_in(self) -> asyncio.AbstractEventLoop | None:
        """The event loop in which this is open; None when it is not."""
        return self._shared.loop

    @property
    def recorder(self) -> Recorder:
        return self._session.recorder

    @property
    def history(self) -> History:
        return self._session.history

    @property
    def _session(self) -> Session:
        """The guard of all verbs. Compares the loop only, since a forked child has another one too."""
        session = self._shared.session
        return session if session is not None and session.loop is running_loop() else self._shared.checked()

    def using(self, connection: object) -> JoinedClient:
        """The verbs in the caller's own transaction on `connection`; the caller commits.

        `await app.using(connection).schedule(...)`, or `async with app.using(connection):` around verbs of the app and
        of its handlers. Raises BadInput for a connection that the store cannot join (also at the first verb: whether it
        is to the store's own database is asked there), SetupError for a store that shares no database with anybody.
        """
        return JoinedClient(self, connection)


class JoinedClient(ClientVerbs):
    """Every verb of the app, in the transaction that the connection is in. The caller began it, and commits it.

    As `async with app.using(connection):` it applies to every verb of the app and of its handlers that is awaited
    within the block. It opens and closes nothing.
    """

    def __init__(self, client: Client, connection: object) -> None:
        self.config, self.clock, self.actor, self.carrier = client.config, client.clock, client.actor, client.carrier
        self._client = client
        self._check_payload = client._check_payload
        transactions = client.store.features.transactions
        if transactions is None:
            raise SetupError("this store cannot take part in a transaction; sqlite:, postgresql: and mysql: can")
        self._joined = transactions.using(connection)
        self._joined_session = client._session.within(self._joined)

    def enter(self, *, here: bool = False) -> None:
        """From now on the verbs of this context take part, until `leave`. May be nested."""
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
        self._client._session  # noqa: B018 - raises where the app is not open
        return self._joined_session


class SharedSession:
    """The session of an open client, in one event loop of one process. The first `enter` opens it, the last `leave`
    closes it."""

    def __init__(self, begin: Callable[[], Coroutine[Any, Any, Session]]) -> None:
        self.session: Session | None = None
        self.entered = 0
        self._begin = begin
        self._opening: asyncio.Task[None] | None = None
        """Done once it is open."""
        self._closing: asyncio.Task[None] | None = None
        self._process = os.getpid()
        self._inherited: list[object] = []

    async def enter(self) -> None:
        """Raises SetupError in another loop than the one it is open in, and the errors of opening."""
        self._forget_the_parents()
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open(self._closing), name="bide open")
        elif self._opening.get_loop() is not asyncio.get_running_loop():
            raise SetupError(_ELSEWHERE)
        self.entered += 1
        try:
            await asyncio.shield(self._opening)
        except BaseException:
            await self.leave()
            raise

    async def leave(self) -> None:
        """Close it if this is the last; a caller that is cancelled does not stop that."""
        self._forget_the_parents()
        if self._opening is None:
            return
        if self._opening.get_loop() is not asyncio.get_running_loop():
            raise SetupError(_ELSEWHERE)
        self.entered -= 1
        if self.entered == 0:
            opening, self._opening = self._opening, None
            opening.cancel()  # it is open, or no caller waits for it any more
            self._closing = asyncio.get_running_loop().create_task(self._close(opening), name="bide close")
            await asyncio.shield(self._closing)

    async def _open(self, closing: asyncio.Task[None] | None) -> None:
        if closing is not None and closing.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([closing])  # it may be of the very store
        self.session = await self._begin()

    async def _close(self, opening: asyncio.Task[None]) -> None:
        await asyncio.wait([opening])
        session, self.session = self.session, None
        if session is not None:
            await session.close()

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop in which it is open; None: it is not."""
        self._forget_the_parents()
        return None if self.session is None else self.session.loop

    def checked(self) -> Session:
        """The session. Raises NotOpen, and SetupError in another loop than its own; in no loop it does not."""
        self._forget_the_parents()
        if self.session is None:
            raise NotOpen(
                "not open: use `async with app:` around this, also in a forked child, or app.sync from synchronous code"
            )
        if running_loop() not in (None, self.session.loop):
            raise SetupError(_ELSEWHERE)
        return self.session

    def _forget_the_parents(self) -> None:
        """In a forked child nothing is open: what the parent opened is left alone, and not garbage-collected either."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._inherited += (self._opening, self._closing, self.session)
            self._opening = self._closing = self.session = None
            self.entered = 0
