"""The seams: what the engine asks of a store, a sink, a timer and a clock, and nothing more."""

from __future__ import annotations

from bide.ports.instruments import Carrier, Instrument, TableStats, Wakes
from bide.ports.sinks import Policy, Route, Sink
from bide.ports.store import (
    COUNTED,
    AnswersApart,
    Diagnoses,
    Finding,
    HasSchema,
    Heard,
    Joined,
    JoinsTransaction,
    KeepsEvents,
    Listening,
    Notifies,
    Parted,
    Served,
    Shares,
    Store,
    TellsTime,
    Verbs,
)
from bide.ports.tables import DueRow, Head, Raced, RowRefused, Table, Taken, WatchesTables
from bide.ports.time import Clock, ScaledClock, SystemClock, Timer

__all__ = [
    "COUNTED",
    "AnswersApart",
    "Carrier",
    "Clock",
    "Diagnoses",
    "DueRow",
    "Finding",
    "HasSchema",
    "Head",
    "Heard",
    "Instrument",
    "Joined",
    "JoinsTransaction",
    "KeepsEvents",
    "Listening",
    "Notifies",
    "Parted",
    "Policy",
    "Raced",
    "Route",
    "RowRefused",
    "ScaledClock",
    "Served",
    "Shares",
    "Sink",
    "Store",
    "SystemClock",
    "Table",
    "TableStats",
    "Taken",
    "TellsTime",
    "Timer",
    "Verbs",
    "Wakes",
    "WatchesTables",
]
