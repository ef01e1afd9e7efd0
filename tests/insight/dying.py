"""Tasks that have died, of errors that a test chooses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bide import Bide
from bide.core.records import OutcomeKind, Settlement

DAY = 86_400_000


async def let_die(app: Bide, topic: str, errors: Mapping[str, str | None], payload: Any = None) -> None:
    """Tasks that died of these errors, by key, in this order."""
    await app.schedule_many([app.new(topic, payload, key=key, delay="0s") for key in errors])
    left = len(errors)
    while left:
        now = app.clock.now()
        leased = await app.store.lease({topic: 500}, now=now, until=now + DAY, holder="w")
        settled = [
            Settlement(topic, one.key, one.token, OutcomeKind.DEAD, keep_until=now + DAY, error=errors[one.key])
            for one in leased.tasks
        ]
        assert all(await app.store.settle(settled, now=app.clock.now()))
        left -= len(settled)
