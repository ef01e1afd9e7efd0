"""What the tests of the console share: somebody who looks at the instance `one` of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.service.calling import Running
from tests.service.console.browsing import Browser


@pytest.fixture
def browser(one: Running) -> Iterator[Browser]:
    """Without scripts, and with nothing in its cookies but a zone."""
    found = Browser(one.url)
    yield found
    found.close()
