"""The rules of the architecture, read off the imports: who may know whom, and what each layer may do."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from tests.programs import python

import bide
from bide.core import lifecycle
from bide.core.lifecycle import ABSENT, TABLE, Verb
from bide.core.records import State

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "bide"
BESIDE = {f"bide_{name}": ROOT / name for name in ("bench", "proofs", "lab")}
"""The folder of each other distribution, by its package. It may import all of the product, which imports none of it."""
QUESTIONS = [["What"], ["Who"], ["Whether"], ["Whose"], ["Whom"]]
"""First words that make a docstring a riddle."""

PUBLIC: tuple[str, ...] = (
    "Answer", "At", "BadInput", "BadPayload", "Bide", "BideError", "Cron", "Dead", "DeadRow", "Defer", "Done",
    "DuplicateHandler", "Event", "EventKind", "Every", "Exponential", "Fixed", "Handler", "Ladder", "LeaseLost",
    "MissingExtra", "NewTask", "NotOpen", "OnConflict", "Outcome", "OutcomeUnknown", "PartlyFailed", "RRule", "Ref",
    "Result", "Retry", "Row",
    "ScaledClock", "Settings", "SetupError", "Sql", "State", "StoreCorrupt", "StoreError", "StoreFull",
    "StoreMismatch", "StoreUnavailable", "SystemClock", "TableSource", "Task", "Watch", "Worker",
)  # fmt: skip
"""Every public name of `bide` but `__version__`. A name is added here on purpose, and stays."""

# Which layers each layer may import, itself apart. `core <- ports <- {timers, stores, engine, sinks} <- wiring <- ...`,
# and `engine <- insight <- {cli, service}`.
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "ports": {"core"},
    "timers": {"core", "ports"},
    "stores": {"core", "ports"},
    "engine": {"core", "ports"},
    "insight": {"core", "ports", "engine"},
    "sinks": {"core", "ports", "_version"},
    "settings": {"core"},
    "extensions": {"core"},
    "wiring": {"core", "ports", "timers", "stores", "engine", "sinks", "settings", "extensions"},
    "app": {"core", "ports", "engine", "sinks", "settings", "wiring"},
    "bide": {"core", "ports", "engine", "settings", "app", "_version"},
    "service": {"core", "ports", "engine", "insight", "settings", "wiring", "app", "bide", "_version"},
    "cli": {
        "core", "ports", "engine", "insight", "settings", "extensions", "wiring", "app", "bide", "service", "_version",
    },
    "__main__": {"cli"},
    "_version": set(),
}  # fmt: skip
OUTSIDE = {"testing"}
"""Shipped with the product: it may import any of it, and nothing imports it."""

STORE_PARTS = {
    "batches", "cursors", "driver_adapters", "listeners", "naive_times", "named_queries", "resending", "server",
    "sorted_chunks", "sql", "urls",
}  # fmt: skip
"""What is in stores/ and no backend but a part that backends share: a data structure, a clock, all of SQL servers."""

STANDARD_IN_CORE = {
    "__future__", "bisect", "calendar", "collections", "contextlib", "dataclasses", "datetime", "enum", "fractions",
    "functools", "hashlib", "itertools", "math", "random", "re", "types", "typing",
}  # fmt: skip
"""What core may use of the standard library: nothing that waits, reads a clock, or touches the world."""

ALONE_IN_CORE = {
    "bide.core.names": {"os", "time"},
    "bide.core.payloads": {"sys"},
    "bide.core.recurrence.zones": {"zoneinfo"},
}
"""What one module of core may import besides. An id is a time and noise, and says nothing about when anything happens.
The time zone database is read as a table of constants, and pydantic is found only if it was imported."""

OTHERS: dict[str, set[str]] = {
    "stores": {"msgspec", "aiohttp", "apsw", "redis", "hiredis", "asyncpg", "asyncmy"},
    "sinks": {"msgspec", "aiohttp", "opentelemetry", "yarl"},
    "cli": {"msgspec", "click", "rich", "uvloop"},
    "service": {"msgspec", "uvicorn", "prometheus_client", "opentelemetry", "jinja2", "markupsafe"},
}
"""Other people's packages that a layer may import; msgspec alone where a layer is not listed."""

HEAVY = (
    "aiohttp", "apsw", "asyncmy", "asyncpg", "click", "hypothesis", "importlib.metadata", "multiprocessing",
    "opentelemetry", "prometheus_client", "pydantic", "pygments", "pytest", "rich", "sqlite3", "starlette", "unittest",
    "urllib.request", "uvicorn", "uvloop", "bide.cli", "bide.insight", "bide_bench", "bide_lab", "bide.service",
    "bide.sinks.webhook", "bide.stores.http", "bide.stores.mysql", "bide.stores.postgres", "bide.stores.redis",
    "bide.stores.sqlite", "bide.testing", "hiredis", "redis",
)  # fmt: skip
"""What `import bide` must not load: each is needed by some programs only, and costs all of them."""


class Import(NamedTuple):
    """One import statement, resolved: `from bide.core import names` is `bide.core.names`."""

    path: Path
    line: int
    target: str

    @property
    def importer(self) -> str:
        return module_of(self.path)

    def __str__(self) -> str:
        return f"{self.path.relative_to(SOURCE.parent)}:{self.line} imports {self.target}"


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in sources()}


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of a module, wherever it stands: also in functions, and for the type checker alone."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(path, node.lineno, inner if inner in MODULES else base)


@cache
def all_imports() -> list[Import]:
    """Read when the first test asks: every process that collects the tests would have to wait for it."""
    return list(dict.fromkeys(one for path in sources() for one in imports_of(path)))


def layer_of(module: str) -> str:
    """The layer that a module of bide's belongs to: its first name below `bide`, or "bide" for the front door."""
    return module.split(".")[1] if "." in module else "bide"


def is_ours(module: str) -> bool:
    return module == "bide" or module.startswith("bide.")


def in_layer(layer: str) -> list[Import]:
    return [one for one in all_imports() if layer_of(one.importer) == layer]


def listed(offences: list[Import]) -> str:
    return "\n".join(str(one) for one in offences)


def test_every_layer_has_its_rule() -> None:
    layers = {layer_of(module) for module in MODULES}
    assert {"core", "ports"} <= layers
    assert layers <= set(MAY_IMPORT) | OUTSIDE, "a new layer needs a line in MAY_IMPORT"


def test_arrows_point_inward() -> None:
    offences = [
        one
        for layer, allowed in MAY_IMPORT.items()
        for one in in_layer(layer)
        if is_ours(one.target) and layer_of(one.target) not in {layer, *allowed}
    ]
    assert not offences, listed(offences)


def test_nothing_in_the_wheel_imports_another_distribution() -> None:
    others = {"tests", "bench", *BESIDE}
    offences = [one for one in all_imports() if one.target.partition(".")[0] in others]
    assert not offences, listed(offences)


def test_distributions_need_what_they_import_and_make_no_circle() -> None:
    needs: dict[str, set[str]] = {}
    for package, folder in BESIDE.items():
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        needs[package] = {Requirement(text).name.replace("-", "_") for text in project["dependencies"]} & BESIDE.keys()
        code = "".join(path.read_text(encoding="utf-8") for path in (folder / "src").rglob("*.py"))
        imported = set(re.findall(r"^ *(?:from|import) (\w+)", code, re.MULTILINE))
        assert imported & BESIDE.keys() - {package} == needs[package], package
    TopologicalSorter(needs).prepare()


def test_no_store_imports_another() -> None:
    def part(module: str) -> str | None:
        names = module.split(".")
        return names[2] if len(names) > 2 else None

    offences = [
        one
        for one in in_layer("stores")
        if one.target.startswith("bide.stores") and part(one.target) not in {part(one.importer), *STORE_PARTS}
    ]
    assert not offences, listed(offences)


def test_the_app_names_no_sink_but_that_of_handlers() -> None:
    """And only the wiring names stores, as MAY_IMPORT says."""
    offences = [one for one in in_layer("app") if one.target.startswith("bide.sinks")]
    assert [one.target for one in offences if one.target != "bide.sinks.handlers"] == [], listed(offences)


def test_core_does_no_input_or_output_and_reads_no_clock() -> None:
    offences = []
    for one in in_layer("core"):
        first = one.target.partition(".")[0]
        allowed = STANDARD_IN_CORE | ALONE_IN_CORE.get(one.importer, set())
        if first not in allowed | {"bide", "msgspec"}:
            offences.append(one)
    assert not offences, listed(offences)

    readers = {"now", "utcnow", "today"}
    for path in sources():
        if layer_of(module_of(path)) in {"core", "ports"}:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in readers:
                    pytest.fail(f"{path.name}:{node.lineno} reads a clock: {ast.unparse(node)}")
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"open", "input"}:
                    pytest.fail(f"{path.name}:{node.lineno} does I/O: {ast.unparse(node)}")


def test_other_peoples_packages_stay_where_they_belong() -> None:
    offences = []
    for one in all_imports():
        first, layer = one.target.partition(".")[0], layer_of(one.importer)
        if first in sys.stdlib_module_names or first == "bide" or layer in OUTSIDE:
            continue
        if first not in OTHERS.get(layer, {"msgspec"}):
            offences.append(one)
    assert not offences, listed(offences)


def test_a_timer_is_told_the_time() -> None:
    runs_one = {"bide.timers.drive"}  # for asyncio or a thread: these two may wait
    offences = [
        one
        for one in in_layer("timers")
        if one.target.partition(".")[0] in {"asyncio", "threading", "time"} and one.importer not in runs_one
    ]
    assert not offences, listed(offences)


EVERY = [SOURCE, *BESIDE.values()]
MOST_MODULES, LONGEST_FUNCTION = 15, 60


def packages() -> list[Path]:
    return sorted({path.parent for root in EVERY for path in root.rglob("*.py")})


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_a_package_is_small_and_defines_a_class_once() -> None:
    for package in packages():
        modules = [path for path in sorted(package.glob("*.py")) if path.name != "__init__.py"]
        assert len(modules) <= MOST_MODULES, f"split {named(package)} by what its modules are about"
        classes = [
            node.name
            for path in modules
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        ]
        twice = sorted(name for name in set(classes) if classes.count(name) > 1)
        assert not twice, f"{named(package)}: {twice}"


def wrong_in(path: Path) -> Iterator[str]:
    if path.stem in {"utils", "util", "common", "helpers", "helper", "manager", "misc"}:
        yield "name what it is"
    module = ast.parse(path.read_text(encoding="utf-8"))
    if path.name != "_version.py" and not ast.get_docstring(module):
        yield "a module's docstring says what it is"
    for node in ast.walk(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            if node.value.value.split(maxsplit=1)[:1] in QUESTIONS:
                yield f"line {node.lineno}: begin with the thing or the act"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if (node.end_lineno or node.lineno) - node.lineno >= LONGEST_FUNCTION:
                yield f"line {node.lineno}: too long"
        elif isinstance(node, ast.ImportFrom):
            private = [one.name for one in node.names if one.name.startswith("_") and one.name != "__version__"]
            if private:
                yield f"line {node.lineno}: {private} is another module's own"


def test_a_module_says_what_it_is_and_its_functions_are_short() -> None:
    paths = [path for root in EVERY for path in sorted(root.rglob("*.py"))]
    wrong = [f"{named(path)}: {one}" for path in paths for one in wrong_in(path)]
    assert not wrong, "\n".join(wrong)


def test_no_import_circle() -> None:
    """Also none that only the type checker would go round."""
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for one in all_imports():
        if one.target in MODULES and one.target != one.importer:
            graph[one.importer].add(one.target)
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


DIALECT = re.compile(r"\b(tidings?|whoever|whomever|befalls?|lest|seldom|dearer|desk|keeper)\b", re.IGNORECASE)


def test_code_and_docs_speak_plain_english() -> None:
    """Words of an older vocabulary, for which there are usual ones: notification, any caller, fault, long poll."""
    found = [
        f"{named(path)}:{number} {match[0]}"
        for root in (*EVERY, ROOT / "docs", ROOT / "examples")
        for path in sorted(root.rglob("*.*"))
        if path.suffix in (".py", ".md", ".sql", ".lua", ".html", ".toml")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := DIALECT.search(line))
    ]
    assert not found, "\n".join(found)


def test_public_names() -> None:
    assert sorted(bide.__all__) == sorted((*PUBLIC, "__version__"))
    assert not [name for name in bide.__all__ if not hasattr(bide, name)]
    visible = {
        name for name, value in vars(bide).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert visible == set(PUBLIC), "what can be imported from bide is what is promised, and nothing else"


def test_importing_bide_loads_nothing_heavy() -> None:
    bare, found = (
        set(python("-c", f"import sys{also}; print(*sys.modules, sep='\\n')").stdout.split()) for also in ("", ", bide")
    )
    assert "bide" in found
    assert not set(HEAVY) & (found - bare)


def test_the_base_install_is_small(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    direct = [Requirement(text).name for text in project["dependencies"]]
    assert "tzdata" in project["dependencies"], "small containers have no zone data, not even UTC"
    assert len(direct) <= 4
    assert len(closure(direct)) <= 8


def closure(names: list[str]) -> set[str]:
    """All distributions that installing `names` brings here, by what the installed ones say that they need."""
    found: set[str] = set()
    ahead = [name.lower().replace("_", "-") for name in names]
    while ahead:
        name = ahead.pop()
        if name in found:
            continue
        found.add(name)
        for text in importlib.metadata.requires(name) or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                ahead.append(needed.name.lower().replace("_", "-"))
    return found


# What the drawing in core/lifecycle.py shows, as (label, from, to). A state that a verb leaves as it is has no arrow.
DRAWN: set[tuple[str, State | None, State]] = {
    ("schedule", ABSENT, State.WAITING),
    ("lease", State.WAITING, State.LEASED),
    ("cancel", State.WAITING, State.CANCELLED),
    ("cancel", State.LEASED, State.CANCELLED),
    ("done", State.LEASED, State.DONE),
    ("again", State.LEASED, State.WAITING),
    ("dead", State.LEASED, State.DEAD),
    ("retry", State.LEASED, State.WAITING),
    ("defer", State.LEASED, State.WAITING),
    ("redrive", State.DEAD, State.WAITING),
}
LABELS = {
    Verb.REPLACE: "schedule", Verb.KEEP: "schedule", Verb.EARLIEST: "schedule", Verb.LATEST: "schedule",
    Verb.REFUSE: "schedule", Verb.MOVE: "reschedule", Verb.CANCEL: "cancel", Verb.REDRIVE: "redrive",
    Verb.LEASE: "lease", Verb.EXTEND: "extend", Verb.DONE: "done", Verb.AGAIN: "again", Verb.RETRY: "retry",
    Verb.DEFER: "defer", Verb.DEAD: "dead",
}  # fmt: skip


def test_the_drawing_of_a_tasks_life_is_the_table() -> None:
    assert set(LABELS) == set(Verb)
    transitions = {
        (LABELS[verb], state, to)
        for verb, row in TABLE.items()
        for state, (_, to) in row.items()
        if to is not None and to is not state
    }
    # Scheduling over a task that is there already starts a new life; drawn once, as the arrow out of nothing.
    new_lives = {one for one in transitions if one[0] == "schedule" and one[1] is not ABSENT}
    assert transitions - new_lives == DRAWN

    assert lifecycle.__doc__ is not None
    drawing = lifecycle.__doc__.split("\n\n")[1]
    for label, start, end in DRAWN:
        assert label in drawing
        assert "(nothing)" in drawing if start is ABSENT else start.name in drawing
        assert end.name in drawing
    for unmoved in ("reschedule", "fire_now", "shift"):
        assert unmoved in drawing


def test_generated_documentation_is_up_to_date(root: Path) -> None:
    python("scripts/generate.py", "--check", cwd=root)
    for name, parts in {"settings.md": 1, "lifecycle.md": 2}.items():
        assert (root / "docs" / name).read_text(encoding="utf-8").count("<!-- generated: ") == parts
