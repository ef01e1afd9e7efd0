"""The store under torture: its URLs, the connections that can be disturbed, and the server's own troubles.

`Server` is the interface to a run. Private servers, which may be broken in any way, are `PrivateServer`s. Troubles that
all kinds can have are functions here; those of one kind are in `servers/`.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar
from urllib.parse import urlsplit

from bide.testing.proxy import FaultProxy
from bide_proofs.harness.command import migrated
from bide_proofs.servers.disk import OnDisk
from bide_proofs.servers.process import HOST, ServerMissing
from bide_proofs.servers.server import Running, ServerClock, ServerProcess, stop_all

B = TypeVar("B")
T = TypeVar("T")
Wait: TypeAlias = Callable[[float], bool]
"""Waits for some seconds, or until the run is over; returns True if it is."""
Trouble: TypeAlias = Callable[[random.Random, Wait], str]
"""Causes one trouble, waits for a random time, repairs it, and returns a description. It blocks, so it runs in a thread
and not in the event loop of the proxies. An error that it raises is a mistake of the harness, and ends the run."""


class Common(StrEnum):
    """Troubles that more than one kind of store can have."""

    KILL = "kill -9 of the server"
    RESTART = "server restart"
    STILL = "SIGSTOP of the server"
    FAILOVER = "failover"
    HAND_OVER = "hand-over"
    MEMORY = "memory full"
    CROWDED = "too many connections"
    DISK = "disk full"
    CLOCK = "clock jump"
    OOM = "OOM"


FARTHEST = 2.0
"""The most seconds by which a store's clock is set wrong, in either direction."""
_KILLED_FOR_MEMORY = "the kernel's killer sends the process SIGKILL, as 'kill -9 of the server' does"
"""The reason why servers of one process have Common.KILL but no OOM."""
CONNECTIONS = 150
"""The limit of connections of each server that can be crowded."""
LONGEST_AWAY = 2.0
"""The most seconds until a dead server is started again."""
_CROWDED_FOR = (0.5, 2.0)
FULL_FOR = (1.0, 4.0)
_STILL = (0.2, 5.0)
_JUMPED = (1.0, 4.0)
"""Seconds until a clock is set back."""


class Server:
    """One store under torture, with defaults for most. It is started, queried and stopped on one event loop."""

    name: str
    """The name in the report: "redis", "postgres"."""
    gives_back = False
    """True if the store itself ends leases that it reported to no caller (`history.events.Header`)."""
    ahead = 0.0
    """Seconds by which the store's clock is ahead of this machine's now; 0 unless a trouble has set it. The run reads
    it 20 times a second, so that histories contain the store's clock."""
    farthest = 0.0
    """The greatest `ahead`, in either direction, that a trouble may set; 0 if the clock cannot be set. Recorded times
    are judged with a tolerance of twice that, times in the store's own answers to leases with none."""

    def __init__(self, direct: str = "") -> None:
        self.direct = direct
        """The URL of the store without a proxy, for queries before and after a run."""
        self.urls: Sequence[str] = ()
        """The URLs for clients and workers, used in turn, through `proxies` if possible. Set when the server starts,
        and fixed until it is stopped."""
        self.worker_url: str | None = None
        """The URL for workers instead, if clients reach the store through the workers."""
        self.proxies: Sequence[FaultProxy] = ()
        """Proxies that may reset, hold, delay and throttle connections, and drop replies. Empty if the store does not
        use TCP."""
        self.cannot: dict[str, str] = {}
        """Troubles that the server cannot have here, with the reason, for the report."""
        self.environment: Mapping[str, str] = {}
        """Variables for clients and workers, in addition to the run's own."""

    async def start(self) -> None:
        """Start the server, ready for clients and with an empty store. Raises ServerMissing of servers/, or an OSError;
        the caller must stop it then, too."""
        raise NotImplementedError

    def troubles(self) -> Mapping[str, Trouble]:
        """The troubles that it can have besides those of its connections, by name. The run causes one at a time."""
        return {}

    async def stop(self) -> None:
        """Stop it and leave nothing: no process, no proxy, no file outside its folder."""

    def about(self) -> dict[str, Any]:
        """Its version, durability and set-up for the report, available once it is started."""
        raise NotImplementedError


async def in_thread(call: Callable[..., T], *given: Any, over: threading.Event | None = None) -> T:
    """Run `call` in a thread. When cancelled, set `over` and wait for its end."""
    running = asyncio.ensure_future(asyncio.to_thread(call, *given))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if over is not None:
            over.set()
        await asyncio.wait([running])
        running.result()
        raise


# --- servers of our own


class PrivateServer(Server):
    """Servers of our own, whose clock can be set if libfaketime is installed.

    Threads start them, cause their troubles and end them, so that their proxies on the event loop are never blocked.
    """

    server: Running
    """All servers together, for kinds that are started and stopped as one."""
    durability: ClassVar[str]
    set_up: ClassVar[str]
    lacks: ClassVar[Mapping[str, str]] = {}
    """Troubles that no server of this kind can have, with the reason."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self.version = ""
        self.nodes: Sequence[OnDisk] = ()
        """The servers that have a disk."""
        self.clock: ServerClock | None = None
        self._no_clock = ""
        try:
            self.clock = ServerClock()
            self.farthest = FARTHEST
        except ServerMissing as error:
            self._no_clock = str(error)

    @property
    def ahead(self) -> float:  # type: ignore[override]
        return self.clock.ahead if self.clock else 0.0

    async def start(self) -> None:
        await in_thread(self.run)
        await self.open()
        no_disk = next((node.disk.refused for node in self.nodes if node.disk.refused), "")
        oom = "" if Common.OOM in self.further_troubles() else _KILLED_FOR_MEMORY
        found = {Common.CLOCK: self._no_clock, Common.DISK: no_disk, Common.OOM: oom, **self.lacks}
        self.cannot = {name: reason for name, reason in found.items() if reason}

    def run(self) -> None:
        """Start all servers, and set `version`; in a thread."""
        self.server.start()

    async def open(self) -> None:
        """Open the proxies, and set `urls` and `direct`; on the event loop."""
        raise NotImplementedError

    def end(self) -> None:
        """End all servers; in a thread."""
        self.server.stop()

    async def proxy(self, port: int, *, host: str = HOST, at: int = 0) -> FaultProxy:
        """Open one more of `proxies` in front of that port, at port `at` if given."""
        proxy = FaultProxy(host, port)
        proxy.port = at
        await proxy.accept()
        self.proxies = (*self.proxies, proxy)
        return proxy

    async def stop(self) -> None:
        try:
            for proxy in self.proxies:
                await proxy.close()
        finally:
            await in_thread(self.end)

    def troubles(self) -> Mapping[str, Trouble]:
        there = {name: fault_on(self.victim, what) for name, what in _OF_ALL.items()}
        there |= {**self.further_troubles(), Common.CLOCK: self._clock_set}
        return {name: trouble for name, trouble in there.items() if name not in self.cannot}

    def victim(self, chance: random.Random) -> Any:
        """The server that suffers the troubles of all kinds."""
        raise NotImplementedError

    def further_troubles(self) -> Mapping[str, Trouble]:
        """The troubles of this kind only, by name, including those that it `cannot` have here."""
        return {}

    def about(self) -> dict[str, Any]:
        return {"version": self.version, "durability": self.durability, "set-up": self.set_up}

    def _clock_set(self, chance: random.Random, wait: Wait) -> str:
        """Set the servers' clock ahead or back, and correct it some seconds later."""
        assert self.clock is not None
        jump, lasts = chance.uniform(-FARTHEST, FARTHEST), chance.uniform(*_JUMPED)
        for_a_while(partial(self.clock.shift, jump), partial(self.clock.shift, 0), lasts, wait)
        way = "ahead" if jump > 0 else "back"
        return f"set the server's clock {abs(jump):.1f} s {way}, and right again after {lasts:.1f} s"


Happening: TypeAlias = Callable[[Any, random.Random, Wait], str]
"""Causes a fault of a server, repairs it, and returns a description."""


def fault_on(pick: Callable[[random.Random], Any], what: Happening) -> Trouble:
    """The trouble in which `what`, such as `killed`, happens to the picked server."""
    return lambda chance, wait: what(pick(chance), chance, wait)


def for_a_while(begin: Callable[[], B], end: Callable[[], T], seconds: float, wait: Wait) -> tuple[B, T]:
    """Call `begin`, wait, and always call `end`; return both results."""
    try:
        began = begin()
        wait(seconds)
    finally:
        ended = end()
    return began, ended


def killed(node: ServerProcess, chance: random.Random, wait: Wait) -> str:
    """Kill the server by SIGKILL, and start it again on the same data."""
    away = chance.uniform(0, LONGEST_AWAY)
    _, took = for_a_while(node.kill, node.mend, away, wait)
    return f"killed {node.name}, started it again after {away:.1f} s; it answered {took:.1f} s later"


def restarted(node: ServerProcess, chance: random.Random, wait: Wait) -> str:
    """End the server in order, and start it again."""
    _, took = for_a_while(node.halt, node.mend, 0, wait)
    return f"restarted {node.name}; it answered {took:.1f} s after it had ended"


def stood_still(node: ServerProcess, chance: random.Random, wait: Wait) -> str:
    """Stop the server by SIGSTOP, and continue it by SIGCONT."""
    lasts = chance.uniform(*_STILL)
    for_a_while(node.pause, node.resume, lasts, wait)
    return f"let {node.name} stand still for {lasts:.1f} s"


def crowded(node: Any, chance: random.Random, wait: Wait) -> str:
    """Disconnect all clients, and let strangers take every connection.

    `node.stranger()` opens a connection, and raises OSError if none is left; `node.throw_out(stranger)` uses it to end
    the connections of clients.
    """
    lasts, strangers, ends = chance.uniform(*_CROWDED_FOR), 0, 0.0
    with ExitStack() as open_to_us:
        first = open_to_us.enter_context(node.stranger())
        while not ends or time.monotonic() < ends:
            try:
                open_to_us.enter_context(node.stranger())
                strangers += 1
            except OSError:
                # no connection is left: end the clients' connections; strangers and clients race for them
                node.throw_out(first)
                ends = ends or time.monotonic() + lasts
                if wait(0.02):
                    break
    return f"threw all clients out, and let {strangers} strangers take the connections for {lasts:.1f} s"


def disk_full(node: OnDisk, chance: random.Random, wait: Wait) -> str:
    """Fill the server's disk for a while. If this ended the server, start it again, as an operator would."""
    lasts, used, ended = chance.uniform(*FULL_FOR), 0, False
    try:
        used = node.disk.fill()
        node.need_room()
        wait(lasts)
    finally:
        node.disk.free()
        ended = not node.running
        node.mend()
        node.has_room()
    end = ", over which it ended, and was started again" if ended else ""
    return f"let the disk of {node.name} be full for {lasts:.1f} s with {used / 1e6:.1f} MB on it{end}"


_OF_ALL: Mapping[str, Happening] = {
    Common.KILL: killed, Common.RESTART: restarted, Common.STILL: stood_still, Common.CROWDED: crowded,
    Common.DISK: disk_full,
}  # fmt: skip
"""The troubles of all kinds, by name."""


class TorturedPair(PrivateServer):
    """A primary and a follower that has every commit before it is answered, so that a failover loses none. Both are
    behind proxies; replication bypasses them."""

    node: ClassVar[Any]
    """The kind of server, which can follow another. It is `OnDisk` and has `follows` and `promote`. `discard` makes its
    next start its first. After `await_follower(other)`, the other has all earlier commits, and every later commit
    before it is answered."""
    follower: ClassVar[str]
    """The word for the server that follows."""
    options: ClassVar[Mapping[str, str]]
    """The options of both servers."""
    query: ClassVar[str] = ""
    """The query of a URL with both servers, by which clients find the writable one."""
    asks_version: ClassVar[str]
    """The SQL statement for the version."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.primary, self.standby = (
            self.node(folder / f"server-{number}", clock=self.clock, options=self.options, name=f"server {number}")
            for number in (1, 2)
        )
        self.nodes = [self.primary, self.standby]
        self.standby.follows = self.primary

    def url(self, *ports: int) -> str:
        """The URL of the writable server, through these ports."""
        own = urlsplit(self.primary.url)
        hosts = ",".join(f"{HOST}:{port}" for port in ports)
        url: str = own._replace(netloc=f"{own.username}@{hosts}", query=self.query).geturl()
        return url

    def run(self) -> None:
        self.primary.start()
        asyncio.run(migrated(self.primary.url))
        self.standby.start()
        self.primary.await_follower(self.standby)
        self.version = f"{self.node.title} {self.primary.value(self.asks_version)}"

    async def open(self) -> None:
        ports = [node.port for node in self.nodes]
        self.direct = self.url(*ports)
        self.urls = (self.url(*[(await self.proxy(port)).port for port in ports]),)

    def end(self) -> None:
        # the standby first: a primary that ends in order waits for its standby
        stop_all((self.standby, self.primary))

    def victim(self, chance: random.Random) -> Any:
        return self.primary

    def further_troubles(self) -> Mapping[str, Trouble]:
        return {
            f"kill -9 of the {self.follower}": fault_on(lambda _: self.standby, killed),
            Common.FAILOVER: self._failover,
        }

    def _failover(self, chance: random.Random, wait: Wait) -> str:
        """Kill the primary for good, promote the follower, and make a new follower in the old one's place."""
        old, new, away = self.primary, self.standby, chance.uniform(0, LONGEST_AWAY / 2)
        # a follower that was killed has lost received changes that it had not applied, and fetches them again
        old.await_follower(new)
        try:
            old.kill()
            wait(away)
        finally:
            new.promote()
            self.primary, self.standby = new, old
            old.discard()
            old.follows = new
            old.start()
            new.await_follower(old)
        return f"killed {old.name} for good, promoted {new.name} after {away:.1f} s, and made the other its follower"
