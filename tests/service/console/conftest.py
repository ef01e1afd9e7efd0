"""What the tests of the console share: stores, and somebody who looks at the instance `one` of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from tests.service.calling import Running, fresh_store, running
from tests.service.console.browsing import Browser, patient

__all__ = ["patient"]
Visit = Callable[..., Browser]


@pytest.fixture(params=["memory", "sqlite", "redis"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a store with nothing in it."""
    with fresh_store(request) as found:
        yield found


@pytest.fixture
def one() -> Iterator[Running]:
    """An instance on a store in memory; a module may have its own."""
    with running("memory:") as found:
        yield found


@pytest.fixture
def visit() -> Iterator[Visit]:
    """A new browser at an instance: `visit(one, language="zh-CN")`. It is closed with the test."""
    with ExitStack() as stack:
        yield lambda one, **how: stack.enter_context(closing(Browser(one.url, **how)))


@pytest.fixture
def browser(one: Running, visit: Visit) -> Browser:
    """Without scripts, and with nothing in its cookies but a zone."""
    return visit(one)
