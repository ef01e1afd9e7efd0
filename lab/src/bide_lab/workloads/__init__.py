"""What is asked of a strategy, and what is done to it meanwhile: one file for each family of workloads."""

from __future__ import annotations

from collections.abc import Mapping

from bide_lab.workload import Workload
from bide_lab.workloads.faults import Away, Cut, Killed, Restarted, TwoAtOnce
from bide_lab.workloads.load import Burst, Churn, Horizon, Steady
from bide_lab.workloads.relays import Head, Relay
from bide_lab.workloads.rest import Idle, Trips, Verbs
from bide_lab.workloads.signals import Beyond, Deaf, Failover, Gap, Many, Slow, Uneven
from bide_lab.workloads.structures import Cost, Crowd, Laps, Touch
from bide_lab.workloads.writes import Writer

_EVERY: tuple[Workload, ...] = (
    Steady(),
    Burst(),
    Horizon(),
    Churn(),
    Idle(),
    Verbs(),
    Trips(),
    Killed(),
    Cut(),
    TwoAtOnce(),
    Away(),
    Restarted(),
    Failover(),
    Beyond(),
    Deaf(),
    Gap(),
    Slow(),
    Many(),
    Uneven(),
    Relay(),
    Head(),
    Writer(),
    Crowd(),
    Cost(),
    Laps(),
    Touch(),
)
WORKLOADS: Mapping[str, Workload] = {one.name: one for one in _EVERY}
"""By name, in the order in which they are run and reported."""
