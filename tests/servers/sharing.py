"""One set of servers for all processes of a run: whoever needs one asks the process that hands out the tests.

A server is started when it is first asked for, and ends with the run. A test that names its keys, schemas or queues
does not notice that others use the server too; one that needs a server to itself starts a private one.
"""

from __future__ import annotations

from collections import defaultdict
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from typing import Any

import pytest

from bide_proofs.servers.process import ServerFailed, ServerMissing
from bide_proofs.servers.services import SharedServers

_ADDRESS = "bide_servers"


class Lender:
    """Starts servers for whoever asks at `address`."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="bide-run-")
        self._servers = SharedServers(Path(self._folder.name))
        self._starting: defaultdict[str, Lock] = defaultdict(Lock)
        self.address = f"{self._folder.name}/ask"
        self._listener = Listener(self.address, "AF_UNIX", backlog=16)
        Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                asking = self._listener.accept()
            except OSError:  # closed
                return
            Thread(target=self._answer, args=(asking,), daemon=True).start()

    def _answer(self, asking: Connection[Any, Any]) -> None:
        with asking:
            kind = asking.recv()
            try:
                with self._starting[kind]:
                    answer: str | Exception = self._servers.url(kind)
            except (ServerMissing, ServerFailed) as error:
                answer = error
            asking.send(answer)

    def close(self) -> None:
        self._listener.close()
        self._servers.stop()
        self._folder.cleanup()


class LentServers:
    """`SharedServers` of the process at `address`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.urls: dict[str, str] = {}

    def url(self, kind: str) -> str:
        if kind not in self.urls:
            with Client(self._address, "AF_UNIX") as asking:
                asking.send(kind)
                answer = asking.recv()
            if isinstance(answer, Exception):
                raise answer
            self.urls[kind] = answer
        return self.urls[kind]

    def stop(self) -> None:
        """The lender's part."""


def servers_of(config: pytest.Config, folder: Path) -> SharedServers | LentServers:
    """Those of the whole run; of this process, with their data in `folder`, where it is the only one."""
    given: dict[str, str] = getattr(config, "workerinput", {})
    return LentServers(given[_ADDRESS]) if _ADDRESS in given else SharedServers(folder)


_lender = pytest.StashKey[Lender]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    config.stash[_lender] = Lender()
    config.add_cleanup(config.stash[_lender].close)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput[_ADDRESS] = node.config.stash[_lender].address
