"""How many of each topic a worker can start now, so that no topic's flood takes the others' share (P6).

Every topic has a share of the worker's slots kept free for it (an equal part, at most its own concurrency). Beyond its
share a topic takes what nobody has kept. Pure arithmetic, O(topics).
"""

from __future__ import annotations

from collections.abc import Mapping

from bide.core.records import Topic
from bide.engine.lanes import Lanes


def wants(lanes: Mapping[Topic, Lanes], slots: int) -> tuple[dict[Topic, int], bool]:
    """How many to ask for, by topic (those without room are left out), and whether `slots` was the limit for any."""
    occupied = sum(lane.occupied for lane in lanes.values())
    share = max(1, slots // max(1, len(lanes)))
    kept = {topic: max(0, min(share, lane.route.concurrency) - lane.occupied) for topic, lane in lanes.items()}
    loose = max(0, slots - occupied - sum(kept.values()))
    asked: dict[Topic, int] = {}
    for topic, lane in lanes.items():
        count = min(lane.free, kept[topic] + loose)
        if count > 0:
            loose -= max(0, count - kept[topic])
            asked[topic] = count
    return asked, any(asked.get(topic, 0) < lane.free for topic, lane in lanes.items())
