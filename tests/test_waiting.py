"""No test waits or judges by the speed of the machine: every sleep and measured time is in `tests/waiting.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
CLOCKS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "time", "time_ns"}
"""Functions of `time`; `time()` is a method of event loops too."""


def sleeps(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls of `time.sleep`, and of `asyncio.sleep` with anything but 0."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep":
            owner = node.func.value
            if not isinstance(owner, ast.Name) or owner.id not in {"time", "asyncio", "anyio", "trio"}:
                continue
            yields = len(node.args) == 1 and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            if owner.id == "time" or not yields:
                yield node.lineno, f"{owner.id}.sleep: wait for a condition by tests.waiting.until, or say why by pause"
        elif isinstance(node, ast.ImportFrom) and node.module in {"time", "asyncio"}:
            taken = sorted({name.name for name in node.names} & ({"sleep"} | CLOCKS))
            if taken:
                yield node.lineno, f"from {node.module} import {', '.join(taken)}: name the module where it is used"


def reads_a_clock(node: ast.AST) -> bool:
    """`time.monotonic()` and its kin, and `loop.time()`; a store's `await store.time()` is data of the test."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CLOCKS
        and (
            (isinstance(node.func.value, ast.Name) and node.func.value.id in {"time", "loop"})
            or "get_running_loop" in ast.dump(node.func.value)
            or (isinstance(node.func.value, ast.Attribute) and node.func.value.attr == "loop")
        )
    )


def measured(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Comparisons of more and less with what a clock said, also by way of names of the same function."""
    if not any(map(reads_a_clock, ast.walk(tree))):
        return  # most files: then no name of a function is measured either
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            names = _measured_names(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Compare) and _is_of_size(node) and _measures(node, names):
                    yield node.lineno, "a comparison with measured time: assert order, counts or states, or not_before"


def _is_of_size(node: ast.Compare) -> bool:
    """What is equal to a time that was read is data, but for `pytest.approx`."""
    return "approx" in ast.dump(node) or any(isinstance(one, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for one in node.ops)


def _measured_names(function: ast.AST) -> set[str]:
    names: set[str] = set()
    while True:
        more = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr)
            and node.value is not None
            and _measures(node.value, names)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        if more <= names:
            return names
        names |= more


def _measures(node: ast.AST, names: set[str]) -> bool:
    return any(reads_a_clock(one) or (isinstance(one, ast.Name) and one.id in names) for one in ast.walk(node))


def offences(text: str) -> list[str]:
    tree = ast.parse(text)
    return [f"line {line}: {what}" for line, what in sorted({*sleeps(tree), *measured(tree)})]


def test_the_tests_wait_for_conditions_and_judge_by_them() -> None:
    found = [
        f"{path.relative_to(TESTS)}, {one}"
        for path in sorted(TESTS.rglob("*.py"))
        if path != TESTS / "waiting.py"
        for one in offences(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "time.sleep(1)", "time.sleep(0)", "await asyncio.sleep(0.1)", "await asyncio.sleep(step)",
        "from asyncio import sleep", "from time import monotonic", "assert time.monotonic() - began < 2",
        "began = time.perf_counter(); took = time.perf_counter() - began; ok = took < 0.1",
        "while loop.time() < ends: pass", "assert asyncio.get_running_loop().time() < 5",
    ],
)  # fmt: skip
def test_what_it_refuses(line: str) -> None:
    assert len(offences(f"async def test() -> None:\n    {line.replace('; ', chr(10) + '    ')}\n")) == 1


@pytest.mark.parametrize(
    "line", ["await asyncio.sleep(0)", "at = time.time()", "assert await store.time() == now", "assert 1 < 2"]
)
def test_what_it_lets_pass(line: str) -> None:
    assert offences(f"async def test() -> None:\n    {line}\n") == []
