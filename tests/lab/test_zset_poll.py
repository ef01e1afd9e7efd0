"""S4, the sorted set that is asked again and again: what each variant claims, and what it is known for."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.lab.playing import keeps_its_word, named, shows

from bide.lab.strategies.s04_zset_poll import RemoveAfter, RemoveBefore, RemoveRange, SmallestOnly
from bide.lab.strategy import Flaw, Strategy

pytestmark = pytest.mark.real_time

VARIANTS: list[type[Strategy]] = [RemoveAfter, RemoveBefore, SmallestOnly, RemoveRange]


@pytest.mark.parametrize("strategy", VARIANTS, ids=named)
async def test_it_does_what_it_claims(strategy: type[Strategy], redis_url: str, tmp_path: Path) -> None:
    await keeps_its_word(strategy, {"redis": redis_url}, tmp_path)


@pytest.mark.parametrize(("strategy", "flaw"), [(one, flaw) for one in VARIANTS for flaw in one.flaws], ids=named)
async def test_its_flaw_is_seen(strategy: type[Strategy], flaw: Flaw, redis_url: str, tmp_path: Path) -> None:
    seen, _ = await shows(strategy, flaw, {"redis": redis_url}, tmp_path)
    assert seen
