"""The examples for FastAPI and Django work, on SQLite and on PostgreSQL: what rolls back leaves no timer behind."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import asyncpg
import httpx
import pytest
import pytest_asyncio

from bide.stores.postgres import schema
from bide.stores.sqlite import SqliteStore

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SITE = EXAMPLES / "django_site"
PATIENCE = 60.0


@pytest_asyncio.fixture(params=["sqlite", "postgres"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """The URL of a database of the test's own, with bide's tables in it."""
    if request.param == "sqlite":
        store = SqliteStore(tmp_path / "shop.db")
        await store.migrate()
        yield f"sqlite:///{tmp_path}/shop.db"
        return
    shared = request.getfixturevalue("postgres_url")
    name = "t" + secrets.token_hex(5)
    connection = await asyncpg.connect(shared)
    try:
        await connection.execute(f"CREATE DATABASE {name}")
        url = f"{shared.rpartition('/')[0]}/{name}"
        await schema.migrate(url)
        yield url
        await connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await connection.close()


@pytest.fixture
def fastapi_app(database: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("SHOP_DATABASE", database)
    monkeypatch.setenv("SHOP_CLOSES_AFTER", "1s")
    spec = importlib.util.spec_from_file_location("fastapi_app", EXAMPLES / "fastapi_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fastapi_app", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.real_time
async def test_fastapi(fastapi_app: ModuleType) -> None:
    api: Any = fastapi_app.api
    shop: Any = fastapi_app.shop
    transport = httpx.ASGITransport(api)
    async with fastapi_app.lifespan(api), httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        unpaid, paid = [(await client.post("/orders")).json()["number"] for _ in range(2)]
        sold_out = await client.post("/orders?sold_out=true")
        assert sold_out.status_code == 409
        assert (await client.post(f"/orders/{paid}/pay")).json() == {"timer_cancelled": True}
        assert [task.key async for task in shop.find(topic="order.close")] == [str(unpaid)]
        assert (await client.get(f"/orders/{max(unpaid, paid) + 1}")).json() == {"status": None}
        ends = time.monotonic() + PATIENCE
        while (status := (await client.get(f"/orders/{unpaid}")).json()["status"]) == "unpaid":
            assert time.monotonic() < ends
            await asyncio.sleep(0.02)
        assert status == "closed"
        assert (await client.post(f"/orders/{unpaid}/pay")).status_code == 409
        assert (await client.get(f"/orders/{paid}")).json() == {"status": "paid"}


BEFORE = """
unpaid, paid = (client.post("/orders").json()["number"] for _ in range(2))
sold_out = client.post("/orders", {"sold_out": "1"}).status_code
cancelled = client.post(f"/orders/{paid}/pay").json()
found = {"unpaid": unpaid, "paid": paid, "sold_out": sold_out, "cancelled": cancelled, "orders": Order.objects.count(),
         "timers": [task.key for task in app.sync.find(topic="order.close")]}
"""
AFTER = """
ends = time.monotonic() + 60
while (status := client.get(f"/orders/{unpaid}").json()["status"]) == "unpaid" and time.monotonic() < ends:
    time.sleep(0.02)
found = {"unpaid": status, "late": client.post(f"/orders/{unpaid}/pay").status_code,
         "paid": client.get(f"/orders/{paid}").json()["status"]}
"""


class Site:
    """The Django site, each part of it in a process of its own."""

    def __init__(self, database: str) -> None:
        named = {name: value for name, value in os.environ.items() if not name.startswith("BIDE_")}
        self._environment: Mapping[str, str] = named | {
            "SHOP_DATABASE": database, "SHOP_CLOSES_AFTER": "1s", "DJANGO_SETTINGS_MODULE": "shop.settings",
            "PYTHONWARNINGS": "error::RuntimeWarning",
        }  # fmt: skip

    def manage(self, *arguments: str) -> str:
        return self._run("manage.py", *arguments)

    def drive(self, code: str, **given: Any) -> dict[str, Any]:
        """Run requests against the site, with Django's test client; what they found."""
        values = "".join(f"{name} = {value!r}\n" for name, value in given.items())
        script = (
            "import django, json, time\ndjango.setup()\n"
            "from django.test import Client\nfrom orders.models import Order\nfrom orders.tasks import app\n"
            f"client = Client()\n{values}{code}\nprint(json.dumps(found))\n"
        )
        found: dict[str, Any] = json.loads(self._run("-c", script).splitlines()[-1])
        return found

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=SITE, env=self._environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout

    def worker(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "manage.py", "bide_worker"], cwd=SITE, env=self._environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip


@pytest.fixture
def site(database: str) -> Site:
    made = Site(database)
    made.manage("migrate", "--verbosity", "0")
    return made


@pytest.mark.real_time
async def test_django(site: Site) -> None:
    await asyncio.to_thread(walk_through, site)


def walk_through(site: Site) -> None:
    assert "No changes detected" in site.manage("makemigrations", "--check", "--dry-run")
    before = site.drive(BEFORE)
    unpaid, paid = before["unpaid"], before["paid"]
    assert before == {
        "unpaid": unpaid, "paid": paid, "sold_out": 409, "cancelled": {"timer_cancelled": True}, "orders": 2,
        "timers": [str(unpaid)],
    }  # fmt: skip
    with site.worker() as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "at work\n"
            after = site.drive(AFTER, unpaid=unpaid, paid=paid)
            worker.send_signal(signal.SIGTERM)
            _, errors = worker.communicate(timeout=PATIENCE)
        finally:
            worker.kill()
    assert after == {"unpaid": "closed", "late": 409, "paid": "paid"}
    assert worker.returncode == 0, errors
    assert "Traceback" not in errors
