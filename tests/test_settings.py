"""Settings: where each comes from, what is refused and by which name, and that secrets stay secret."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bide.app import _THREADS
from bide.core.errors import BadInput
from bide.settings import Described, Settings, describe


def test_without_anything_given_the_defaults_hold() -> None:
    assert Settings.from_env({}) == Settings()
    assert Settings().store == "sqlite:///bide.db"
    assert Settings().lease == 10_000
    assert Settings().keep_dead == 14 * 86_400_000
    assert Settings().actor is None


def test_the_code_wins_over_the_environment_and_that_over_the_default() -> None:
    environ = {"BIDE_LEASE": "20s", "BIDE_CONCURRENCY": " 50 ", "PATH": "/bin"}
    settings = Settings.from_env(environ, lease="30s", grace=timedelta(seconds=5), actor=None)
    assert settings == Settings(lease=30_000, concurrency=50, grace=5_000)


OTHER = {
    "store": "memory:", "lease": "2h", "max_sleep": "2s", "concurrency": "77", "topic_concurrency": "77", "grace": "2h",
    "max_past": "2h", "payload_limit": "77", "keep_done": "2h", "keep_cancelled": "2h", "keep_dead": "2h",
    "losses": "77", "sqlite_synchronous": "normal", "actor": "nina", "history": "off", "traces": "off",
    "token": "bide_abc",
}  # fmt: skip
"""For each setting a text that is accepted and is not the default."""


@pytest.mark.parametrize("one", describe(), ids=lambda one: one.name)
def test_every_setting_has_its_variable_and_says_what_it_is(one: Described) -> None:
    assert one.variable == f"BIDE_{one.name.upper()}"
    changed = Settings.from_env({one.variable: OTHER[one.name]})
    assert getattr(changed, one.name) != one.default
    assert changed == dataclasses.replace(Settings(), **{one.name: getattr(changed, one.name)})
    assert one.sentence.endswith(".")
    if one.default_text:
        assert one.kind.read(one.default_text, one.name) == one.default


BAD = {
    "lease": ["", "10", "soon", "-1s", "0s", "9ms", "25h"],
    "max_sleep": ["0s", "61m"],
    "concurrency": ["", "0", "-1", "1.5", "many", "1000001", "１０", "9" * 30, "1e3", "0x10"],
    "payload_limit": ["0", "256KiB"],
    "keep_dead": ["forever", "-1d", "9999999999d"],
    "losses": ["0"],
    "sqlite_synchronous": ["", "off", "2"],
    "store": ["", "bide.db", "/var/lib/bide.db", "sqlite:\x00a", ":memory:"],
    "actor": ["", "x" * 201, "a\nb"],
    "token": ["", "two words", "naïve", "x" * 1001],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_a_bad_value_is_refused_by_the_name_of_its_variable(name: str, text: str) -> None:
    variable = f"BIDE_{name.upper()}"
    with pytest.raises(BadInput) as caught:
        Settings.from_env({variable: text})
    assert caught.value.field == variable
    assert caught.value.accepted
    with pytest.raises(BadInput) as caught:
        Settings.from_env({}, **{name: text})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("lease", "10s"), ("lease", 0), ("lease", 1.5), ("concurrency", True), ("concurrency", "5"), ("concurrency", 0),
     ("sqlite_synchronous", "off"), ("sqlite_synchronous", None), ("store", 5), ("store", "bide.db"), ("actor", ""),
     ("keep_done", -1), ("keep_done", None)],
)  # fmt: skip
def test_the_record_itself_refuses_what_it_cannot_mean(name: str, value: Any) -> None:
    with pytest.raises(BadInput) as caught:
        Settings(**{name: value})
    assert caught.value.field == name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(Settings(), name, value)


@pytest.mark.parametrize(
    ("unknown", "closest"),
    [("LEESE", "LEASE"), ("STOER", "STORE"), ("LEASE_FILE", "LEASE"), ("CONCURENCY", "CONCURRENCY"), ("", "")],
)
def test_an_unknown_variable_is_refused_with_the_closest_that_there_is(unknown: str, closest: str) -> None:
    with pytest.raises(BadInput, match=rf"BIDE_{unknown}.* closest name is BIDE_{closest}") as caught:
        Settings.from_env({f"BIDE_{unknown}": "postgresql://bide:hunter2@db/bide"})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(BadInput, match="closest name is lease"):
        Settings.from_env({}, leese="10s")


def test_what_kubernetes_says_about_services_is_passed_over() -> None:
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_8420_TCP", "PORT_8420_TCP_ADDR",
             "REDIS_SERVICE_HOST", "REDIS_PORT_6379_TCP_PROTO")  # fmt: skip
    assert Settings.from_env({f"BIDE_{name}": "tcp://10.0.0.1:8420" for name in names}) == Settings()


def test_a_secret_may_come_from_a_file_and_is_not_shown(tmp_path: Path) -> None:
    secret = tmp_path / "store"
    secret.write_text("postgresql://bide:hunter2@db/bide\n", encoding="utf-8")
    settings = Settings.from_env({"BIDE_STORE_FILE": str(secret)})
    assert settings.store == "postgresql://bide:hunter2@db/bide"
    assert "hunter2" not in repr(settings)
    secret.write_text("//bide:hunter2@db/bide", encoding="utf-8")
    with pytest.raises(BadInput) as caught:
        Settings.from_env({"BIDE_STORE_FILE": str(secret)})
    assert caught.value.field == "BIDE_STORE_FILE"
    assert "hunter2" not in str(caught.value)


def test_a_secret_file_has_to_be_there_and_be_the_only_one(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"BIDE_STORE_FILE.*readable"):
        Settings.from_env({"BIDE_STORE_FILE": str(tmp_path / "nothing")})
    with pytest.raises(BadInput, match=r"BIDE_STORE_FILE.*readable"):
        Settings.from_env({"BIDE_STORE_FILE": "a\x00b"})
    with pytest.raises(BadInput, match="only one of BIDE_STORE and BIDE_STORE_FILE"):
        Settings.from_env({"BIDE_STORE": "memory:", "BIDE_STORE_FILE": str(tmp_path / "nothing")})
    given = Settings.from_env({"BIDE_STORE_FILE": str(tmp_path / "nothing")}, store="memory:")
    assert given.store == "memory:"


def test_what_the_documents_say_of_defaults_is_so(root: Path) -> None:
    ours = Settings()
    said = " ".join((root / "docs" / "handlers.md").read_text(encoding="utf-8").split())
    for sentence in (
        f"in one process ({ours.topic_concurrency} by default; {_THREADS} threads for plain functions)",
        f"A worker runs up to {ours.concurrency:,} in all",
        f"({ours.lease // 1000} s unless set)",
        f"JSON, up to {ours.payload_limit // 1024} KiB",
    ):
        assert sentence in said
