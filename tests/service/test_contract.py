"""schemathesis plays every call by the OpenAPI document: no 5xx, and nothing that the document does not say.

CASES=2000 plays as many of each call in each phase; `make contract` does that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.service.calling import fresh_store, running

from bide.service.contract import CALLS, contents

CASES = os.environ.get("CASES")
HERE = Path(__file__).parent
STORES = ("memory", "sqlite", "redis", "postgres") if CASES else ("memory",)
"""Within all other tests one is enough: every call is made on each store by the tests of the API."""
_SETTINGS = """\
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "3xx", 401, 403, 404, 409, 412, 429]
"""
"""412: a condition of the headers was not met. 5xx is not among them: there is no excuse for one."""


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty store."""
    with fresh_store(request) as url:
        yield url


def test_nothing_breaks_the_contract(store: str, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(_SETTINGS)
    with running(store) as instance:
        done = subprocess.run(
            [
                str(Path(sys.executable).with_name("st")), "run", f"{instance.url}/openapi.json", "--checks", "all",
                "--max-examples", CASES or "4", "--exclude-path", "/v1/events", "--no-color",
                "--request-timeout", "600", "--suppress-health-check", "all",
            ],
            cwd=tmp_path,
            env=os.environ | {"SCHEMATHESIS_HOOKS": "contract_hooks", "PYTHONPATH": str(HERE)},
            capture_output=True,
            text=True,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6_000:] + done.stderr[-2_000:]
    assert f"Tested: {len(CALLS) - 1}" in done.stdout, done.stdout[-2_000:]


def test_the_document_names_every_call() -> None:
    paths = contents()["paths"]
    assert {(call.path, call.method.lower()) for call in CALLS} == {
        (path, method) for path, calls in paths.items() for method in calls
    }
