"""A primary, and one that has every commit before it is answered, so that a failover loses none."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from bide_proofs.servers.server import stop_all
from bide_proofs.torture.server import CROWDED, DISK, FAILOVER, KILL, RESTART, STILL, Trouble, Wait
from bide_proofs.torture.servers.private import PrivateServer, befalls, disk_full, killed, restarted, stood_still

CONNECTIONS = 150
_LONGEST_AWAY = 1.0


class TorturedPair(PrivateServer):
    """Both are behind proxies; they replicate past them."""

    node: ClassVar[Any]
    """The kind of server, of which one may follow the other: it is `OnDisk`, has `follows` and `promote` as a server of
    its kind has, a `discard` that lets its next start be its first, and an `await_follower(other)`, from whose end on
    the other has every commit that is answered, and all that was before."""
    follower: ClassVar[str]
    """The word for the server that follows."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.primary, self.standby = (
            self.node(folder / f"server-{number}", clock=self.clock, options=options, name=f"server {number}")
            for number, options in enumerate(self.options(), start=1)
        )
        self.nodes = [self.primary, self.standby]
        self.standby.follows = self.primary

    def options(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """The options of the first and of the second server."""
        raise NotImplementedError

    def url(self, *ports: int) -> str:
        """The URL of the one that may be written to, by way of these ports."""
        raise NotImplementedError

    def migrate(self, url: str) -> None:
        """Make bide's tables."""
        raise NotImplementedError

    def run(self) -> None:
        self.primary.start()
        self.migrate(self.primary.url)
        self.standby.start()
        self.primary.await_follower(self.standby)

    async def open(self) -> None:
        ports = [node.port for node in self.nodes]
        self.direct = self.url(*ports)
        self.urls = (self.url(*[(await self.proxy(port)).port for port in ports]),)

    def end(self) -> None:
        # the standby first: a primary that ends in order waits for it
        stop_all((self.standby, self.primary))

    def troubles_of_kind(self) -> Mapping[str, Trouble]:
        def primary(chance: random.Random) -> Any:
            return self.primary

        return {
            KILL: befalls(primary, killed),
            f"kill -9 of the {self.follower}": befalls(lambda _: self.standby, killed),
            RESTART: befalls(primary, restarted),
            STILL: befalls(primary, stood_still),
            FAILOVER: self._failover,
            CROWDED: self.crowded,
            DISK: befalls(primary, disk_full),
        }

    def crowded(self, chance: random.Random, wait: Wait) -> str:
        """Throw all clients out, and let strangers take every connection."""
        raise NotImplementedError

    def _failover(self, chance: random.Random, wait: Wait) -> str:
        """Kill the primary for good, promote the other, and make a new one in the old one's place."""
        old, new, away = self.primary, self.standby, chance.uniform(0, _LONGEST_AWAY)
        # one that was killed has forgotten what it had heard and not done, and asks for it again
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
