"""The examples for FastAPI and Django work, on SQLite and on PostgreSQL: what rolls back leaves no timer behind."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import pytest_asyncio
from tests.programs import environment, python
from tests.waiting import PATIENCE, until

from bide.stores.postgres.schema import SCHEMA
from bide.stores.sqlite import SqliteStore
from bide_proofs.servers.postgres import ask

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SITE = EXAMPLES / "django_site"


@contextmanager
def own_database(server: str) -> Iterator[str]:
    """The URL of a new database on a PostgreSQL server that others use too."""
    name = "t" + secrets.token_hex(5)
    ask(server, f"CREATE DATABASE {name}")
    yield f"{server.rpartition('/')[0]}/{name}"
    ask(server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest_asyncio.fixture(params=["sqlite", "postgres"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    """The URL of a database of the test's own, with bide's tables in it."""
    if request.param == "sqlite":
        store = SqliteStore(tmp_path / "shop.db")
        await store.migrate()
        yield f"sqlite:///{tmp_path}/shop.db"
        return
    with own_database(request.getfixturevalue("postgres_url")) as url:
        await SCHEMA.migrate(url)
        yield url


@pytest.fixture
def fastapi_app(database: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("SHOP_DATABASE", database)
    spec = importlib.util.spec_from_file_location("fastapi_app", EXAMPLES / "fastapi_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fastapi_app", module)
    spec.loader.exec_module(module)
    return module


async def test_fastapi(fastapi_app: ModuleType) -> None:
    api: Any = fastapi_app.api
    shop: Any = fastapi_app.shop
    transport = httpx.ASGITransport(api)
    async with fastapi_app.lifespan(api), httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        unpaid, paid = [(await client.post("/orders")).json()["number"] for _ in range(2)]
        sold_out = await client.post("/orders?sold_out=true")
        assert sold_out.status_code == 409
        assert (await client.post(f"/orders/{paid}/pay")).json() == {"timer_cancelled": True}
        assert [task.key async for task in shop.find(topic="order.close", state="waiting")] == [str(unpaid)]
        assert (await client.get(f"/orders/{max(unpaid, paid) + 1}")).json() == {"status": None}
        assert (await client.get(f"/orders/{unpaid}")).json() == {"status": "unpaid"}
        await shop.fire_now("order.close", str(unpaid))

        async def closed() -> bool:
            return bool((await client.get(f"/orders/{unpaid}")).json() == {"status": "closed"})

        _: bool = await until(closed, "the order to be closed")
        assert (await client.post(f"/orders/{unpaid}/pay")).status_code == 409
        assert (await client.get(f"/orders/{paid}")).json() == {"status": "paid"}


BEFORE = """
call_command("migrate", verbosity=0)
call_command("makemigrations", check=True, dry_run=True)
unpaid, paid = (client.post("/orders").json()["number"] for _ in range(2))
sold_out = client.post("/orders", {"sold_out": "1"}).status_code
cancelled = client.post(f"/orders/{paid}/pay").json()
found = {"unpaid": unpaid, "paid": paid, "sold_out": sold_out, "cancelled": cancelled, "orders": Order.objects.count(),
         "timers": [task.key for task in app.sync.find(topic="order.close", state="waiting")]}
"""
AFTER = """
app.sync.fire_now("order.close", str(unpaid))
ends = time.monotonic() + 60
while (status := client.get(f"/orders/{unpaid}").json()["status"]) == "unpaid" and time.monotonic() < ends:
    time.sleep(0.02)
found = {"unpaid": status, "late": client.post(f"/orders/{unpaid}/pay").status_code,
         "paid": client.get(f"/orders/{paid}").json()["status"]}
"""


class Site:
    """The Django site, each part of it in a process of its own."""

    def __init__(self, database: str) -> None:
        self._environment = environment({
            "SHOP_DATABASE": database, "DJANGO_SETTINGS_MODULE": "shop.settings",
            "PYTHONWARNINGS": "error::RuntimeWarning",
        })  # fmt: skip

    def drive(self, code: str, **given: Any) -> dict[str, Any]:
        """Run requests against the site, with Django's test client; what they found."""
        values = "".join(f"{name} = {value!r}\n" for name, value in given.items())
        script = (
            "import django, json, time\ndjango.setup()\n"
            "from django.core.management import call_command\nfrom django.test import Client\n"
            "from orders.models import Order\nfrom orders.tasks import app\n"
            f"client = Client()\n{values}{code}\nprint(json.dumps(found))\n"
        )
        done = python("-c", script, cwd=SITE, environ=self._environment)
        assert "Traceback" not in done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def worker(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "manage.py", "bide_worker"], cwd=SITE, env=self._environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip


async def test_django(database: str) -> None:
    await asyncio.to_thread(walk_through, Site(database))


def walk_through(site: Site) -> None:
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
