"""`bench/peers.py` without its peers: the table of contestants, the arithmetic, and what its parts agree on."""

from __future__ import annotations

import asyncio
import doctest
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.servers.child import ServerMissing
from tests.servers.fixtures import not_installed

ROOT = Path(__file__).resolve().parents[2]
CONTEST = ROOT / "bench" / "contest"


@pytest.fixture
def contest(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of `bench.contest` by name. The folder is no part of the package, so it is put on the path."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"bench.contest.{name}")


@pytest.mark.parametrize("name", ["client", "contestants", "figures", "report", "tasks"])
def test_the_examples_in_the_docstrings_hold(contest: Any, name: str) -> None:
    failed, tried = doctest.testmod(contest(name))
    assert (failed, tried > 0) == (0, True)


def test_every_peer_has_a_module_pinned_requirements_and_a_say_about_its_settings(contest: Any) -> None:
    peers = contest("contestants").PEERS
    on_redis = {"docket", "arq", "saq", "dramatiq", "celery", "huey", "bullmq"}
    assert {name for name, peer in peers.items() if peer.server == "redis"} == on_redis
    on_postgres = {name for name, peer in peers.items() if peer.server == "postgres"}
    assert on_postgres == {"procrastinate", "procrastinate-default", "graphile"}
    assert all(peers[name].setup for name in on_postgres)
    for peer in peers.values():
        module = CONTEST / (f"{peer.module}.cjs" if peer.node else f"{peer.module}.py")
        assert "Settings" in module.read_text(encoding="utf-8")
        assert re.fullmatch(r"\d+(\.\d+)+", peer.version)
        entries = [line for line in peer.requirements.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
        assert len(contest("contestants").pins("\n".join(entries))) == len(entries)


def test_the_loop_is_chosen_only_for_those_who_have_one(contest: Any) -> None:
    contestants = contest("contestants")
    assert contestants.BIDE.command("uvloop", sleepy=False)[-1] == "--uvloop"
    assert "--uvloop" not in contestants.BIDE.command("asyncio", sleepy=False)
    assert contestants.PEERS["arq"].loop("uvloop") == "uvloop"
    assert "uvloop" in contestants.pins(contestants.PEERS["arq"].requirements.read_text(encoding="utf-8"))
    assert contestants.PEERS["huey"].loop("uvloop") == "asyncio"
    assert contestants.PEERS["huey"].command("asyncio", sleepy=True)[-2:] == ("-w", "8")


def test_a_payload_has_its_size_and_is_read_back_from_the_log(
    contest: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tasks, figures = contest("tasks"), contest("figures")
    monkeypatch.setenv("BENCH_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(tasks, "_log", None)
    payload = tasks.text(3, 1_000)
    assert len(payload) == tasks.PAYLOAD
    tasks.started(payload)
    tasks.ended(payload)
    lines = (tmp_path / "log").read_text(encoding="ascii").splitlines()
    found = figures.examine(3, lines, sleeping=True)
    assert (found.missing, found.undone, found.duplicated) == ({1, 2}, {1, 2}, 0)
    assert tasks.pause(tasks.text(tasks.WARM_UP, 0)) == 0.0


def test_a_start_again_is_a_redelivery_before_the_end_and_a_duplicate_after_it(contest: Any) -> None:
    lines = [
        "start 0000001 1000 1001000000",
        "start 0000001 1000 9000000000",
        "end 0000001 1000 9000000001",
        "start 0000001 1000 9500000000",
        "start 0000002 2000 1999000000",
    ]
    found = contest("figures").examine(3, lines, sleeping=True)
    assert (found.redelivered, found.duplicated, found.early) == (1, 1, 1)
    assert (found.missing, found.undone) == ({3}, {2, 3})
    assert found.lateness == [-1.0, 1.0]
    assert (found.latest, found.first, found.last) == (8500.0, 1_001_000_000, 1_999_000_000)


def test_without_a_sleep_every_second_start_is_a_duplicate(contest: Any) -> None:
    lines = ["start 0000001 1000 1001000000", "start 0000001 1000 1002000000"]
    found = contest("figures").examine(1, lines)
    assert (found.redelivered, found.duplicated, found.undone) == (0, 1, set())


def test_a_ratio_is_the_median_of_neighbours_and_never_an_invented_figure(contest: Any) -> None:
    ratio = contest("figures").ratio
    ours = [{"rate": 100.0}, {"rate": 10.0}, {"rate": 90.0}]
    theirs = [{"rate": 50.0}, {"rate": 10.0}, {"rate": 10.0}]
    assert ratio(ours, theirs, "rate") == 2.0
    assert ratio(ours, [{"rate": None}] * 3, "rate") is None
    assert ratio(ours, [{"rate": 0.0}] * 3, "rate") is None
    assert ratio([{}] * 3, theirs, "rate") is None


def test_the_tables_say_who_was_not_measured_and_why(contest: Any) -> None:
    command, report = contest("command"), contest("report")
    measured = command.Outcome(theirs=[{"completed_per_s": 10.0, "missing": 2}], ours=[{"completed_per_s": 50.0}])
    failed = command.Outcome(theirs=[{"completed_per_s": 10.0}], ours=[{}], fault="it fell")
    absent = command.Outcome(reason="there is no node")
    outcomes = {"arq": measured, "saq": failed, "bullmq": absent}
    about = {
        "versions": {"bide": "1"}, "servers": {"redis": "7", "postgres": "15"}, "python": "3", "loop": "asyncio",
        "cpus": 2, "store": "redis",
        "n": 5, "rounds": 1,
    }  # fmt: skip
    shown = report.show(about, {"burst": {name: outcome.as_json("burst") for name, outcome in outcomes.items()}})
    lines = shown.splitlines()
    assert re.search(r"arq +completed_per_s +10 +50 +5 +peer missing 2", shown)
    assert re.search(r"saq +completed_per_s +10 +- +-", shown)
    assert "Redis 7, PostgreSQL 15, bide on redis beside peers on Redis" in shown
    assert "bide beside saq: not measured: it fell" in lines
    assert "bullmq: not measured: there is no node" in lines


def test_a_peer_that_failed_in_one_round_has_no_figures(contest: Any) -> None:
    outcome = contest("command").Outcome(theirs=[{"completed_per_s": 10.0}], ours=[{}], reason="it fell")
    assert outcome.as_json("burst") == {"not_measured": "it fell"}


def test_what_is_left_in_redis_is_found_whatever_it_is_wrapped_in(contest: Any) -> None:
    leaves = contest("server")._leaves
    wrapped = b'{"body": "eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4eHh4"}'
    assert any(leaf == b"x" * 66 for leaf in leaves([[wrapped, None], 7]))


@pytest.mark.faults
async def test_a_database_is_emptied_and_searched_as_a_whole(contest: Any, tmp_path: Path) -> None:
    database, tasks = contest("database"), contest("tasks")
    texts = [tasks.text(number, 1_000) for number in range(1, 5)]
    as_json, as_bytes = json.dumps({"payload": texts[0]}), texts[1].encode().hex()
    try:
        async with database.database_in(tmp_path) as server:
            assert re.match(r"\d+", server.version)
            await server.empty()
            await database.psql(
                server.url,
                f"""CREATE TABLE jobs (args jsonb); INSERT INTO jobs VALUES ('{as_json}');
                CREATE SCHEMA other; CREATE TABLE other.task (payload bytea, note text);
                INSERT INTO other.task VALUES ('\\x{as_bytes}', '{texts[2]}');""",
            )
            assert await server.holds(set(texts)) == set(texts[:3])
            await server.empty()
            assert await server.holds(set(texts)) == set()
            with pytest.raises(contest("server").ServerFault, match="psql"):
                await database.psql(server.url, "SELECT * FROM jobs;")
    except contest("server").ServerFault as error:
        if "not installed" not in str(error):
            raise
        not_installed(ServerMissing(str(error)))


async def test_redis_replies_of_every_kind_are_understood(contest: Any) -> None:
    server = contest("server")
    replies = b"+OK\r\n:7\r\n$3\r\na\r\n\r\n$-1\r\n*2\r\n$1\r\nk\r\n:1\r\n-ERR no\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(b"*1\r\n$4\r\nPING\r\n"))
        writer.write(replies)
        await writer.drain()
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        connection = await server.Connection.open(f"redis://127.0.0.1:{port}")
        assert await connection.call("PING") == b"OK"
        assert await connection._reply() == 7
        assert await connection._reply() == b"a\r\n"[:3]
        assert await connection._reply() is None
        assert await connection._reply() == [b"k", 1]
        with pytest.raises(server.ReplyError, match="ERR no"):
            await connection._reply()
        await connection.close()


async def test_a_client_is_told_by_lines_and_schedules_by_its_one_interface(contest: Any) -> None:
    client, produce = contest("client"), contest("produce")
    calls: list[tuple[str, int]] = []

    class Recorder(client.Client):  # type: ignore[misc, name-defined]
        bulk = True

        async def schedule(self, payload: str, due: int) -> None:
            calls.append((payload[:7], due))

        async def schedule_many(self, items: list[tuple[str, int]]) -> None:
            for payload, due in items:
                await self.schedule(payload, due)

    recorder = Recorder()
    answer = await produce._obey(recorder, {"do": "concurrent", "count": 3, "due": 9_000, "spread": 30})
    assert sorted(calls) == [("0000001", 9_000), ("0000002", 9_010), ("0000003", 9_020)]
    assert answer["seconds"] >= 0
    calls.clear()
    await produce._obey(recorder, {"do": "bulk", "count": 2_500, "due": 9_000, "spread": 0})
    assert [number for number, _ in calls] == [f"{number:07d}" for number in range(1, 2_501)]
    calls.clear()
    await produce._obey(recorder, {"do": "warm", "count": 10})
    assert {number for number, _ in calls} == {"0000000"}
    assert len(calls) == 10


def test_the_command_explains_itself_and_refuses_whom_it_does_not_know() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "bench/peers.py", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )

    helped = run("--help")
    assert (helped.returncode, "recovered_ms" in helped.stdout) == (0, True)
    refused = run("rq")
    assert (refused.returncode, "rq is not a peer" in refused.stderr) == (2, True)


def test_figures_can_be_written_as_json(contest: Any) -> None:
    outcome = contest("command").Outcome(theirs=[{"p50_ms": 2.0, "p99_ms": 4.0}], ours=[{"p50_ms": 1.0, "p99_ms": 1.0}])
    assert json.loads(json.dumps(outcome.as_json("lateness")))["ratio"] == {"p50_ms": 0.5, "p99_ms": 0.25}
