"""A pause of a topic, as it is kept and told."""

from __future__ import annotations

from msgspec import Struct

from bide.core.instants import Millis
from bide.core.records import Topic


class Pause(Struct, frozen=True, kw_only=True):
    """Since when a topic is paused, and by whom."""

    topic: Topic
    since: Millis
    who: str | None = None
