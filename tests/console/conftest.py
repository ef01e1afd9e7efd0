"""The console in a real browser: one browser for each module, one context for each visitor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright
from tests.console.axe import axe_source
from tests.console.browser import Visitor, launch, visitor
from tests.servers.fixtures import not_installed
from tests.service.calling import Api, Running, running
from tests.service.console.browsing import patient

from bide_proofs.servers.process import ServerMissing
from bide_proofs.servers.services import chromium

__all__ = ["patient"]
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


@pytest.fixture(scope="module")
def one() -> Iterator[Running]:
    """An instance, which the tests of a module share."""
    with running("memory:", keep_done="1h", keep_cancelled="1h") as found:
        yield found


@pytest.fixture
def api(one: Running) -> Iterator[Api]:
    """Calls it as a program does."""
    with closing(Api(one.url)) as found:
        yield found


@pytest.fixture
def visits(browser: Browser, one: Running) -> Visits:
    """Opens the console: `with visits(size=NARROW) as visitor`."""

    def visit(where: Running = one, **how: Any) -> AbstractContextManager[Visitor]:
        return visitor(browser, where.url, **how)

    return visit
