"""The families that strategies are reported in: which numbers belong together, and what they have in common."""

from __future__ import annotations

import re
from typing import NamedTuple

from bide_lab.strategy import Strategy

_NUMBER = re.compile(r"\.s(\d\d)_")


class Family(NamedTuple):
    """Strategies that share an idea, and are drawn in one picture."""

    name: str
    """One word, as in the names of pictures."""
    title: str
    about: str
    """What they have in common, in two sentences or three."""
    numbers: tuple[int, ...]


FAMILIES = (
    Family(
        "scans", "Scans of a table",
        "The time stands in a column of a table, and somebody asks again and again which rows are due. It needs "
        "nothing that is not there already. How late a row is and how often the table is read for nothing are one and "
        "the same choice.",
        (1, 2, 3),
    ),
    Family(
        "zsets", "Sorted sets",
        "Redis keeps ids ordered by their times, so that asking for what is due is cheap. What differs is who asks, "
        "and in which order a task is taken out and done: that decides whether one is lost or done twice.",
        (4, 5, 6, 7),
    ),
    Family(
        "expiry", "Key expiry",
        "Each task is a key with a time to live, and the server tells when it has deleted one. The event is for "
        "whoever listens at that moment, and comes when the server gets round to the deletion.",
        (8,),
    ),
    Family(
        "brokers", "Brokers",
        "A broker holds a message for a while and then passes it on. Most can hold it for a few fixed lengths only, "
        "and none lets a message that is under way be moved.",
        (9, 10, 11),
    ),
    Family(
        "timers", "Timers in one process",
        "A data structure in the memory of one process knows what is next. Nothing is as quick, and nothing of it is "
        "left when the process ends.",
        (12, 13, 14, 15, 16, 17),
    ),
    Family(
        "held", "Held in memory",
        "A worker fetches a task at once and holds it, unacknowledged, until its time. The broker takes that for a "
        "worker that is slow, and after a while for one that is dead.",
        (18,),
    ),
    Family(
        "writes", "Two writes",
        "A row is written in one place and its timer in another. Between the two writes the process may die; what "
        "differs is who notices.",
        (19,),
    ),
    Family("bide", "bide", "One index of wake times and leases, on the store that is there.", (20,)),
)  # fmt: skip
OWN = Family("own", "Your own", "Strategies from files of your own.", ())
"""What is in no file of the lab's."""


def family_of(strategy: type[Strategy]) -> Family:
    """By the number in the name of its file.

    >>> from bide_lab.strategies.s04_zset_poll import RemoveAfter
    >>> family_of(RemoveAfter).name
    'zsets'
    """
    found = _NUMBER.search(strategy.__module__)
    number = int(found[1]) if found and strategy.__module__.startswith("bide_lab.") else 0
    return next((one for one in FAMILIES if number in one.numbers), OWN)
