"""A worker's routes and observer, with what looks on attached to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bide.core.records import Record, Settlement, Topic
from bide.engine.worker import Observer
from bide.ports import Instrument, Route


def attached(
    instruments: Sequence[Instrument], routes: Mapping[Topic, Route], observe: Observer | None
) -> tuple[Mapping[Topic, Route], Observer | None]:
    """What a worker shall work on and tell instead of `routes` and `observe`."""
    for instrument in instruments:
        routes = {topic: instrument.route(route) for topic, route in routes.items()}
    observers = [one.observe for one in instruments] + ([] if observe is None else [observe])
    if len(observers) < 2:
        return routes, observers[0] if observers else None

    def observe_all(record: Record, told: Settlement) -> None:
        for one in observers:
            one(record, told)

    return routes, observe_all
