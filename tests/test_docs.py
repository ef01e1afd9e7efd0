"""The documentation is true: its code runs, its links lead somewhere, and the Chinese README has the same code."""

from __future__ import annotations

import importlib.util
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests import programs
from tests.test_web_examples import own_database

ROOT = Path(__file__).resolve().parent.parent
RUNNER = ROOT / "scripts" / "run_document.py"
REDIS = "redis://localhost:6379"
"""What documents call a Redis server: one of the tests' own stands in for it."""
POSTGRES = "postgresql://localhost/shop"
"""And a database: a new one, on a server of the tests."""


def load_runner() -> Any:
    spec = importlib.util.spec_from_file_location("run_document", RUNNER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


blocks_of = load_runner().blocks_of
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def run_document(path: Path, directory: Path) -> programs.Ended:
    """All blocks of `path`, in a process of their own, in `directory`."""
    environ = {"BIDE_STORE": f"sqlite:///{directory}/document.db", "COLUMNS": "120", "NO_COLOR": "1"}
    return programs.python(RUNNER, path, cwd=directory, environ=environ)


def in_english(path: Path) -> Path:
    return path.with_name(path.name.replace(".zh-CN.md", ".md"))


@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if in_english(path) == path and any(block.runs for block in blocks_of(text_of(path)))],
    ids=lambda path: path.name,
)
def test_every_block_runs(path: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text = given = text_of(path)

    def needs(named: str) -> bool:
        return any(block.runs and named in block.text for block in blocks_of(text))

    with ExitStack() as stack:
        if needs(REDIS):
            server = request.getfixturevalue("redis_server")()  # or skipped, where there is none
            given = given.replace(REDIS, server.url.removesuffix("/0"))
        if needs(POSTGRES):
            database = stack.enter_context(own_database(request.getfixturevalue("postgres_url")))
            given = given.replace(POSTGRES, database)
        if given != text:
            path = tmp_path / path.name
            path.write_text(given, encoding="utf-8")
        done = run_document(path, tmp_path)
    for complaint in ("never awaited", "was never retrieved", "ResourceWarning"):
        assert complaint not in done.stderr


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_block_that_does_not_run_has_a_reason(path: Path) -> None:
    taken_out = [block for block in blocks_of(text_of(path)) if block.not_run is not None]
    assert all(block.not_run for block in taken_out)
    comments = text_of(path).count("<!-- not run:")
    assert comments == len(taken_out), "such a comment stands directly above its block"


def test_the_chinese_readme_has_the_same_code() -> None:
    english = [(block.language, block.text) for block in blocks_of(text_of(ROOT / "README.md"))]
    chinese = [(block.language, block.text) for block in blocks_of(text_of(ROOT / "README.zh-CN.md"))]
    assert chinese == english
    assert any(language == "python" for language, _ in english)


@pytest.mark.parametrize("path", [path for path in PAGES if in_english(path) != path], ids=lambda path: path.name)
def test_chinese_code_is_the_english_that_runs(path: Path) -> None:
    english = [block.text for block in blocks_of(text_of(in_english(path))) if block.runs]
    chinese = [block.text for block in blocks_of(text_of(path)) if block.runs]
    assert chinese == [text for text in english if text in chinese], "in its order too"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_within_the_repository_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"```.*?```", "", text_of(path), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    local = [target.partition("#")[0] for target in targets if not re.match(r"[a-z]+:|#", target)]
    missing = [target for target in local if not (path.parent / target).exists()]
    assert not missing


# The runner itself: a document whose code is never run would pass every time.


def python(code: str) -> str:
    return f"```python\n{code}\n```\n"


def shell(language: str, code: str) -> str:
    return f"```{language}\n{code}\n```\n"


SAYS = 'bide () { echo "ran $1"; };'

CASES: dict[str, tuple[str, bool, str]] = {
    "one namespace": (python("x = 1") + python("assert x == 1\nprint('shared')"), True, "shared"),
    "await at the top": (python("import asyncio\nawait asyncio.sleep(0)\nprint('awaited')"), True, "awaited"),
    "the document's line": ("\n\n" + python("\nraise KeyError('here')"), False, 'document.md", line 5'),
    "a failure": (python("assert False"), False, "AssertionError"),
    "taken out": ("<!-- not run: it fails -->\n" + python("assert False"), True, ""),
    "indented": ("1. step\n\n   ```python\n   print('indented')\n   ```\n", True, "indented"),
    "saved": (python("# shop.py\nx = 'saved'") + python("import shop\nprint(shop.x)"), True, "saved"),
    "a failing test": (python("def test_x():\n    assert 1 == 2"), False, "1 failed"),
    "shell": (shell("sh", f"# so\n{SAYS} bide well"), True, "ran well"),
    "console": (shell("console", f"$ {SAYS}\nout\n$ bide well \\\n>   again\nran well"), True, "ran well"),
    "a failing command": (shell("sh", "bide () { return 3; }; bide badly"), False, "exit code 3"),
    "others": (shell("sh", "pip install bide") + shell("text", "raise") + shell("", "raise"), True, ""),
}


@pytest.mark.parametrize(("text", "passes", "shows"), CASES.values(), ids=CASES)
def test_the_runner_runs_what_it_should(
    text: str, passes: bool, shows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    document = tmp_path / "document.md"
    document.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(RUNNER), str(document)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    code = load_runner().main()
    sys.modules.pop("shop", None)
    said = "".join(capfd.readouterr())
    assert (code == 0) is passes, said
    assert shows in said
