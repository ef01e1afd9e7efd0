"""The wheel is complete: every file of the package is in it, and what it installs works."""

from __future__ import annotations

import email
import zipfile
from pathlib import Path

import pytest
from tests.programs import python

SMOKE = """
import asyncio, pathlib, sys
import bide
from bide import Bide, Task

assert pathlib.Path(bide.__file__).is_relative_to(sys.argv[1]), bide.__file__
app = Bide("sqlite:///smoke.db")
fired = asyncio.Event()

@app.handler("order.close")
async def close(task: Task[dict[str, int]]) -> None:
    assert task.payload == {"number": 42}
    fired.set()

async def main() -> None:
    async with app, app.worker():
        answer = await close.schedule({"number": 42}, key="42", delay="10ms")
        assert answer.result == "created"
        await asyncio.wait_for(fired.wait(), 60)

asyncio.run(main())
print("delivered by bide", bide.__version__, flush=True)

import bide.testing.store_suite
from bide.cli import main as command

sys.argv = ["bide", "--help"]
command()
"""

CONTENTS = {
    "bide/__init__.py", "bide/__main__.py", "bide/_version.py", "bide/app.py", "bide/cli", "bide/core", "bide/engine",
    "bide/extensions.py", "bide/insight", "bide/ports", "bide/py.typed", "bide/service", "bide/settings.py",
    "bide/sinks", "bide/stores", "bide/testing", "bide/timers", "bide/wiring.py",
}  # fmt: skip
"""The product, and the tools for users' tests: no proof, no lab, no contest, no test of ours."""


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with what is installed here, so that no network is needed."""
    folder = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--no-isolation", "--wheel", "--outdir", folder, root)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def target(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheel, and nothing else, is installed."""
    folder = tmp_path_factory.mktemp("installed")
    python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile",
           "--disable-pip-version-check", "--target", folder, wheel)  # fmt: skip
    return folder


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path, root: Path) -> None:
    source = root / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "bide").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not name.partition("/")[0].endswith(".dist-info")}
    assert packed == wanted
    assert "bide/stores/sqlite/schema.sql" in packed
    assert {"/".join(name.split("/")[:2]) for name in packed} == CONTENTS


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        (metadata_file,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(packed.read(metadata_file))
        folder = metadata_file.rpartition("/")[0]
        assert packed.read(f"{folder}/licenses/LICENSE")
        entry_points = packed.read(f"{folder}/entry_points.txt").decode()
    needed = metadata.get_all("Requires-Dist") or []
    base = [one for one in needed if "extra ==" not in one]
    assert len(base) <= 4
    assert "tzdata" in base, "on every system: where it has no zone data, UTC itself is unknown"
    every = {"http", "mysql", "postgres", "redis", "serve", "uvloop"}
    of = {extra: {one.partition(";")[0] for one in needed if one.endswith(f"extra == '{extra}'")} for extra in every}
    assert all(of.values())
    assert {one.partition(";")[0] for one in needed if one.endswith("extra == 'all'")} == set().union(*of.values())
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "bide = bide.cli:main" in entry_points
    assert "bide = bide.testing.plugin" in entry_points


def test_the_installed_wheel_delivers_and_its_command_line_starts(target: Path, tmp_path: Path) -> None:
    script = tmp_path / "smoke.py"
    script.write_text(SMOKE, encoding="utf-8")
    environ = {"PYTHONPATH": str(target)}  # the wheel's bide in front of the clone's
    done = python(script, target, cwd=tmp_path, environ=environ)
    assert done.stdout.startswith("delivered by bide")
    assert "schedule" in done.stdout
