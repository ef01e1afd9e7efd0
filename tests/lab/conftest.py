"""Strategies of the lab, played on the servers that they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pytest
from tests.lab.playing import Company, S, setting_of


class Plays(Protocol):
    """Makes the company of a strategy; `more` are further fields of its setting."""

    def __call__(self, strategy: type[S], **more: Any) -> Company[S]: ...


@pytest.fixture
def playing(request: pytest.FixtureRequest, tmp_path: Path) -> Plays:
    def company(strategy: type[S], **more: Any) -> Company[S]:
        urls = {kind: request.getfixturevalue(f"{kind}_url") for kind in strategy.needs}
        return Company(strategy, setting_of(strategy, urls, tmp_path, **more))

    return company
