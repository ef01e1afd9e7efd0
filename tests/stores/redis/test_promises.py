"""Each promise has its tests on Redis: these, on these deployments; `all` are one server, Sentinel and a Cluster.

`Suite.X` is a part of the store suite, which runs on each as a whole (tests/conformance/test_redis.py), as the game
against the memory store does. What one promise has are the sharpest of its tests, not all.

P1 never early
    test_clocks::test_a_lease_is_not_given_before_its_time_whoever_asks                      all
    test_clocks::test_a_server_that_is_hours_off_keeps_every_delay                           all
    test_clocks::test_a_server_whose_clock_is_set_while_it_runs                              all
    test_clocks::test_a_client_whose_clock_is_hours_wrong_is_neither_early_nor_late          all
P2 at least once
    test_killed::test_a_killed_server_loses_nothing_that_was_acknowledged                    all
    test_failover::test_a_replica_takes_over                                                 sentinel cluster
    test_interruptions::test_a_master_and_its_replica_change_places                          sentinel cluster
    test_interruptions::test_a_slot_moves_to_another_server_under_load                       cluster
    test_interruptions::test_the_scripts_are_thrown_away_again_and_again                     all
    test_interruptions::test_connections_are_killed_every_tenth_of_a_second                  all
    test_culling::test_workers_on_redis_die_and_nothing_acknowledged_is_lost                 all
P3 one holder
    test_workers::test_a_worker_that_stands_still_for_longer_than_its_lease                  all
    test_workers::test_workers_come_and_go_and_every_task_is_done_once_and_in_time           all
    Suite.Racing                                                                             all
P4 every verb is one step
    test_lost_answers::test_a_call_that_meets_a_fault_is_done_once                           all
    test_lost_answers::test_two_hundred_callers_on_a_line_that_breaks_all_the_time           all
    Suite.EveryCell                                                                          all
P5 the newest word wins
    test_lost_answers::test_an_older_call_that_arrives_after_a_newer_one_is_refused          all
    test_repeated::test_a_late_answer_gives_nothing_that_is_no_longer_held                   all
    Suite.Changing                                                                           all
P6 nobody is held up
    test_costs::test_nobody_waits_behind_what_is_slow_strange_or_nobodys                     all
    test_damage::test_a_body_of_any_bytes_stops_nobody_and_can_be_replaced                   all
    test_failover::test_a_dead_node_fails_its_own_callers_only                               cluster
    Suite.Fairness                                                                           all
P7 the store has what waits
    test_costs::test_a_worker_holds_only_what_it_runs                                        all
P8 idle is nearly free
    test_costs::test_an_idle_worker_asks_each_shard_once_a_second                            all
    test_wakes::test_losing_every_wake_costs_a_second_and_no_task                            all
    test_wakes::test_a_subscription_that_fell_silent_is_found_and_replaced                   all
P9 a full store drains
    test_memory_full::test_full_servers_refuse_new_work_and_drain                            all
P10 nothing is left
    test_traces::test_nothing_is_left_behind                                                 all
    Suite.Retention                                                                          all
P11 flat cost
    test_costs::test_a_call_costs_the_same_however_much_waits                                all
P12 fencing
    Suite.Tokens                                                                             all
    Suite.Identity                                                                           all
    test_culling::test_workers_on_redis_die_and_nothing_acknowledged_is_lost                 all
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from tests.stores.redis.deployments import DEPLOYMENTS

from bide.testing.store_suite import StoreSuite

SUITES = {"single": "TestRedis", "sentinel": "TestRedisSentinel", "cluster": "TestRedisCluster"}


def promised() -> dict[str, dict[str, set[str]]]:
    """For each promise its tests, and for each of these where it is said to run."""
    promises: dict[str, dict[str, set[str]]] = {}
    tests: dict[str, set[str]] = {}
    for line in (__doc__ or "").splitlines():
        if found := re.match(r"(P\d+) ", line):
            tests = promises[found[1]] = {}
        elif line.startswith("    "):
            test, *where = line.split()
            tests[test] = set(DEPLOYMENTS) if where == ["all"] else set(where)
    return promises


@pytest.fixture(scope="module")
def running(root: Path) -> dict[str, set[str]]:
    """Of each test the deployments on which it runs, as pytest says."""
    places = ("tests/stores/redis", "tests/conformance/test_redis.py", "tests/faults/test_culling.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=--import-mode=importlib", *places],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3_000:] + run.stderr[-3_000:]
    found: dict[str, set[str]] = defaultdict(set)
    for line in filter(lambda line: "::" in line, run.stdout.splitlines()):
        name, _, parameters = line.rstrip("]").partition("[")
        path, *classes, test = name.split("::")
        found[f"{Path(path).stem}::{test}"].update(set(parameters.split("-")) & set(DEPLOYMENTS))
        for part in (one for one in StoreSuite.__mro__ if classes and test in vars(one)):
            found[f"Suite.{part.__name__}"] |= {where for where, suite in SUITES.items() if suite in classes}
    return found


def test_every_promise_has_a_test_on_every_deployment() -> None:
    promises = promised()
    assert list(promises) == [f"P{number}" for number in range(1, 13)]
    for promise, tests in promises.items():
        assert set().union(*tests.values()) == set(DEPLOYMENTS), promise


def test_the_tests_are_there_and_run_where_they_are_said_to(running: dict[str, set[str]]) -> None:
    for promise, tests in promised().items():
        assert tests == {test: running.get(test, set()) for test in tests}, promise


def test_no_test_leaves_a_deployment_out_without_saying_why(root: Path) -> None:
    """Beside the parametrisation, or in the line above it."""
    for path in (root / "tests" / "stores" / "redis").glob("test_*.py"):
        before = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if re.match(r'(@|\w+ = )pytest\.mark\.parametrize\("deployment"', line):
                assert "  # " in line or before.startswith("# "), f"{path.name}: {line}"
            before = line
