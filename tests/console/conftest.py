"""The console in a real browser: one browser for each module, one context for each visitor."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright
from tests.console.axe import axe_source
from tests.console.browser import Visitor, launch, visitor
from tests.console.serving import Served, serving
from tests.servers.child import ServerMissing
from tests.servers.chromium import chromium
from tests.servers.fixtures import not_installed
from tests.servers.keyspace import delete_keys

Visits = Callable[..., AbstractContextManager[Visitor]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for longer than a module: others' tests could have no event loop beside playwright's."""
    try:
        program = chromium()
    except ServerMissing as error:
        not_installed(error)
    with sync_playwright() as playwright:
        found = launch(playwright, program)
        yield found
        found.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core."""
    try:
        return axe_source()
    except ServerMissing as error:
        not_installed(error)


@pytest.fixture(scope="module", params=["sqlite", "redis"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one with nothing in it."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('store')}/tasks.db"
        return
    server, own = request.getfixturevalue("redis_url"), "t" + secrets.token_hex(5)
    yield f"{server}?namespace={own}&shards=4"
    delete_keys(server, own)


@pytest.fixture(scope="module")
def served(store: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`bide serve` on it."""
    with serving(store, tmp_path_factory.mktemp("serve")) as found:
        yield found


@pytest.fixture
def visits(browser: Browser, served: Served) -> Visits:
    """Opens the console: `with visits(size=NARROW) as visitor`."""

    def visit(**how: Any) -> AbstractContextManager[Visitor]:
        return visitor(browser, served.url, **how)

    return visit
