"""Compares the tables with each other, and with what the clients say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

KINDS = ("lost_order", "kept_order", "not_fired", "fired_twice", "fired_uncommitted", "left", "process_ended")
BEGUN, COMMITTED, ROLLED_BACK = "begun", "committed", "rolled back"
"""The words of a client about an order."""


def judge(
    said: Mapping[int, str],
    orders: Iterable[int],
    effects: Sequence[int],
    left: Iterable[str] = (),
    ended: Iterable[str] = (),
) -> dict[str, list[str]]:
    """All that is wrong, by kind. `said`: of an order the last word of its client; `effects`: an order for each row."""
    there = set(orders)
    fired = Counter(effects)
    wrong: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for number, word in said.items():
        if word == COMMITTED and number not in there:
            wrong["lost_order"].append(f"order {number} is not there, though its commit was answered")
        if word == ROLLED_BACK and number in there:
            wrong["kept_order"].append(f"order {number} is there, though it was rolled back")
    wrong["not_fired"] += [f"the timer of order {number} did not fire" for number in sorted(there - fired.keys())]
    for number, times in sorted(fired.items()):
        if times > 1:
            wrong["fired_twice"].append(f"order {number} has {times} effects")
        if number not in there:
            wrong["fired_uncommitted"].append(f"the timer of order {number} fired, and there is no such order")
    wrong["left"] += [f"task {key} is still there" for key in left]
    wrong["process_ended"] += list(ended)
    return wrong
