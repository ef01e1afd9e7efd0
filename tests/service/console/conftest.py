"""What the tests of the console share: somebody who looks at the instance `one` of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.service.calling import Running
from tests.service.console.browsing import PATIENCE, Browser

from bide.service.console import site

_SHIPPED = site.PATIENCE


@pytest.fixture(scope="package", autouse=True)
def patient() -> Iterator[None]:
    """Where the store is not to be silent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "PATIENCE", PATIENCE)
        yield


@pytest.fixture
def shipped_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store is silent."""
    monkeypatch.setattr(site, "PATIENCE", _SHIPPED)


@pytest.fixture
def browser(one: Running) -> Iterator[Browser]:
    """Without scripts, and with nothing in its cookies but a zone."""
    found = Browser(one.url)
    yield found
    found.close()
