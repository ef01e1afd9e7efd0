"""The example of an extension, installed as a user installs it: its store, its sink and its command work."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.programs import environment, python
from tests.service.calling import Api
from tests.service.test_streams import serve
from tests.waiting import until

from bide import BadInput, Bide, Settings, SetupError, extensions
from bide.cli import main
from bide.cli.exits import Exit
from bide.service.serving import ServiceInstance, read_config
from bide.wiring import store_maker

DELIVERS = """
import asyncio
from bide import Bide

app, done = Bide("shelf:mine", keep_done="0s"), []

@app.handler("post.publish")
async def publish(task):
    done.append(task.payload)

async def run():
    async with app, app.worker() as worker:
        await publish.schedule("hello", key="1", delay="10ms")
        await worker.until_empty()
        print(type(app.store).__module__, done)

asyncio.run(run())
"""


@pytest.fixture(scope="module")
def environ(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """With the example's distribution installed; built with what is here, so that no network is needed."""
    folder = tmp_path_factory.mktemp("installed")
    python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation",
           "--disable-pip-version-check", "--target", folder, root / "examples" / "extension")  # fmt: skip
    return environment({"PYTHONPATH": str(folder)})


def test_its_store_passes_the_suite(root: Path, environ: Mapping[str, str]) -> None:
    said = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "tests",
                  cwd=root / "examples" / "extension", environ=environ)  # fmt: skip
    assert " passed" in said.stdout


def test_its_store_is_found_by_the_scheme_of_a_url(environ: Mapping[str, str], tmp_path: Path) -> None:
    assert python("-c", DELIVERS, cwd=tmp_path, environ=environ).stdout == "bide_shelf.store ['hello']\n"


async def test_the_service_delivers_to_its_sink_and_its_command_shows_it(
    environ: Mapping[str, str], tmp_path: Path
) -> None:
    config, lines = tmp_path / "serve.toml", tmp_path / "delivered"
    config.write_text(f'[topics."report.send"]\nsink = "lines:{lines}"\n')
    async with serve(tmp_path, "--config", str(config), **environ) as (_, url):
        with closing(Api(url)) as api:
            api.put("report.send", "7", delay="0s", payload={"to": "ann"})
        await until(lambda: lines.exists() and lines.read_text().endswith("\n"), "the sink to have it")
    shown, helps = (python("-m", "bide", *words, environ=environ).stdout for words in (("shelf", lines), ("--help",)))
    assert shown == "report.send/7: {'to': 'ann'}\n"
    assert "Show what the lines sink has written." in helps


def test_what_is_not_installed_or_cannot_be_loaded_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = EntryPoint("broken", "no.such_module:make", "any")
    monkeypatch.setattr(extensions, "installed", lambda group: {"broken": broken})
    with pytest.raises(SetupError, match=r"'broken'.*cannot be loaded: ModuleNotFoundError"):
        store_maker("broken:x", Settings())
    with pytest.raises(BadInput, match=r'"broken:\.\.\."'):
        store_maker("other:x", Settings())
    said = CliRunner().invoke(main, ["broken"])
    assert (said.exit_code, said.stderr.count("\n")) == (Exit.SETUP, 1)
    for name, folders in {"bench": "./bench", "lab": "./bench ./lab"}.items():
        said = CliRunner().invoke(main, [name])
        told = f"bide: bide {name} is not installed: pip install {folders} (in a clone of bide)\n"
        assert (said.exit_code, said.stderr) == (Exit.SETUP, told)
    assert "cannot be loaded" in CliRunner().invoke(main, ["--help"]).stdout, "and the others are listed"

    both = tmp_path / "both.toml"
    both.write_text('[topics.t]\nsink = "lines:x"\nwebhook = "https://shop.example/"\n')
    with pytest.raises(BadInput, match="a webhook and a sink"):
        read_config(str(both))
    installed = {name: EntryPoint(name, f"builtins:{name}", "any") for name in ("int", "print")}
    monkeypatch.setattr(extensions, "installed", lambda group: installed)
    with pytest.raises(SetupError, match=r"'int'.*cannot be made: ValueError"):
        store_maker("int:x", Settings())
    both.write_text('[topics.t]\nsink = "print:x"')
    with pytest.raises(BadInput, match=r"topics\.t\.sink.*an object with `async deliver"):
        ServiceInstance(Bide("memory:"), read_config(str(both)), host="127.0.0.1")
