"""The ports: the interfaces of stores, sinks, timers and clocks that the engine needs, and nothing more."""

from __future__ import annotations

from bide.ports.diagnosis import Diagnoses, Finding, HasSchema
from bide.ports.facade import StoreFacade
from bide.ports.instruments import Instrument, TableStats, TracePropagator, Wakes
from bide.ports.sinks import Policy, Route, Sink, call_in_thread, final_result, is_coroutine_function
from bide.ports.store import (
    COUNTED,
    Features,
    HasClock,
    JoinsTransaction,
    KeepsEvents,
    Listening,
    Notifies,
    OnTaken,
    OnWake,
    Partitioned,
    Remote,
    Store,
    WorkerRegistry,
)
from bide.ports.tables import DueRow, Head, Raced, RowRefused, Table, Taken, WatchesTables
from bide.ports.time import Clock, ScaledClock, SystemClock, Timer
from bide.ports.verbs import Joined, Pending, Verbs, all_answers, run_at_once

__all__ = [
    "COUNTED", "Clock", "Diagnoses", "DueRow", "Features", "Finding", "HasClock", "HasSchema", "Head", "Instrument",
    "Joined", "JoinsTransaction", "KeepsEvents", "Listening", "Notifies", "OnTaken", "OnWake", "Partitioned", "Pending",
    "Policy", "Raced", "Remote", "Route", "RowRefused", "ScaledClock", "Sink", "Store", "StoreFacade", "SystemClock",
    "Table", "TableStats", "Taken", "Timer", "TracePropagator", "Verbs", "Wakes", "WatchesTables", "WorkerRegistry",
    "all_answers", "call_in_thread", "final_result", "is_coroutine_function", "run_at_once",
]  # fmt: skip
