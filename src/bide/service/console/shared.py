"""What all pages of one instance have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from bide.app import Bide
from bide.core.records import Topic
from bide.engine.presence import WakeChannel
from bide.engine.verdicts import Policy
from bide.service.access import Access
from bide.service.config import ServeConfig
from bide.service.health import Health


class Shared(NamedTuple):
    """Belongs to the event loop in which `app` is open."""

    app: Bide
    health: Health
    config: ServeConfig
    """Of this instance: which topics go to which webhook, and by which policy."""
    policies: Mapping[Topic, Policy]
    instance: str
    """This instance's name among all that serve the store."""
    channel: WakeChannel
    """How its worker and its desk hear of earlier wakes."""
    access: Access
