"""The workloads: what is asked of a strategy, and what is done to it meanwhile. One file for each family of them."""

from __future__ import annotations

from collections.abc import Mapping

from bide_lab.workload import Workload
from bide_lab.workloads.faults import Away, Beyond, Cut, Deaf, Failover, Killed, Restarted, TwoAtOnce, Writer
from bide_lab.workloads.load import Burst, Churn, Crowd, Gap, Head, Horizon, Many, Relay, Slow, Steady, Uneven
from bide_lab.workloads.memory import Cost, Laps, Touch
from bide_lab.workloads.waiting import Idle, Trips, Verbs

_EVERY: tuple[Workload, ...] = (
    Steady(), Burst(), Horizon(), Churn(), Idle(), Verbs(), Trips(), Killed(), Cut(), TwoAtOnce(), Away(), Restarted(),
    Failover(), Beyond(), Deaf(), Gap(), Slow(), Many(), Uneven(), Relay(), Head(), Writer(), Crowd(), Cost(), Laps(),
    Touch(),
)  # fmt: skip
WORKLOADS: Mapping[str, Workload] = {one.name: one for one in _EVERY}
"""By name, in the order in which they are run and reported."""
