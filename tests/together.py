"""Several tests at once, as `make test` runs them, and with nothing beside them those that are marked `alone`.

One process leaves the machine idle for half of the time, as tests wait: for servers, processes and moments. So
pytest-xdist hands a module's functions, or a class, to whichever of its workers is free. A test that only waits for
something to come true does not mind company; a few hold a figure that others' load would spoil, such as a median of
20 ms. Those take the machine for themselves. It costs one run with one sum at its end, where running them in a second
pytest would cost two of each.

The workers are processes, so turns are taken by two locks on files. Every test is in the room: together with others,
or alone. It goes in by the door, and who wants to be alone stays in the door until the room is empty, so that
others who come and go do not keep it waiting for ever. The kernel takes both locks back from a worker that dies.
"""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

LONG = (
    "test_torture.py", "simulation/test_seeds.py", "simulation/test_mutants.py",
    "cli/bench/test_bench.py", "test_postgres.py::TestPostgres::", "test_mysql.py::TestMySql::",
    "redis/test_failover.py", "test_examples.py",
    "conformance/test_state_machine.py", "test_redis_strategies.py",
    "conformance/test_redis.py::TestRedis::", "test_culling.py", "test_demo.py", "test_docs.py", "test_lost_answers.py",
    "console/test_million.py", "console/test_actions.py", "console/test_looks.py",
    "test_timer_strategies.py", "test_sql_strategies.py", "redis/test_workers.py", "service/test_contract.py",
    "faults/test_serving.py", "postgres/test_joined.py", "tables/test_at_work.py",
    "servers/test_servers.py", "test_interruptions.py", "test_work.py", "test_wheel.py", "test_killing.py",
)  # fmt: skip
"""What takes longest goes first, that it is not left to the end for one worker. A name too few or too many costs time
and nothing else; `--durations` tells."""

_FOLDER = "bide_folder_of_locks"


class Turns:
    """In a worker: every test waits for its turn."""

    def __init__(self, folder: Path) -> None:
        self._door = (folder / "door").open("w")
        self._room = (folder / "room").open("w")
        self._alone = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """The long ones first, and modules with tests that want to be alone last, when others have less to do."""
        late = {item.path for item in items if _wants_to_be_alone(item)}
        items.sort(key=lambda item: (_wants_to_be_alone(item), item.path in late, _place(item)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Also its fixtures are set up and torn down in its turn. One that is followed by another stays alone."""
        if not self._alone:
            fcntl.flock(self._door, fcntl.LOCK_EX)
            self._alone = _wants_to_be_alone(item)
            fcntl.flock(self._room, fcntl.LOCK_EX if self._alone else fcntl.LOCK_SH)
            if not self._alone:
                fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            self._alone = self._alone and nextitem is not None and _wants_to_be_alone(nextitem)
            if not self._alone:
                fcntl.flock(self._room, fcntl.LOCK_UN)
                fcntl.flock(self._door, fcntl.LOCK_UN)


def _wants_to_be_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


def _place(item: pytest.Item) -> int:
    return next((place for place, name in enumerate(LONG) if name in item.nodeid), len(LONG))


def pytest_configure(config: pytest.Config) -> None:
    given: dict[str, Any] | None = getattr(config, "workerinput", None)
    if given is not None:
        config.pluginmanager.register(Turns(Path(given[_FOLDER])))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the process that hands out the tests: tells a worker where the locks are."""
    node.workerinput[_FOLDER] = node.config.stash[_folder].name


_folder = pytest.StashKey[TemporaryDirectory[str]]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    config.stash[_folder] = TemporaryDirectory(prefix="bide-turns-")
    config.add_cleanup(config.stash[_folder].cleanup)
