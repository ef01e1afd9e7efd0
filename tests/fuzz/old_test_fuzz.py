"""A bug would be found by fuzzing, named and run again. `tests/proofs` fuzzes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bide.core.errors import BadInput
from bide_proofs.fuzz.drawing import Draw
from bide_proofs.fuzz.running import Target, Wrong, check, pure, refusals, run


def finds(case: object, cases: int = 20) -> list[str]:
    target = Target("odd", "", pure(case), limit=0.2)  # type: ignore[arg-type]
    return [find.what for find in asyncio.run(run(target, Path(), seed=1, cases=cases)).finds]


def test_another_exception_is_a_find_once() -> None:
    def case(draw: Draw) -> None:
        draw.note("the input")
        if draw.chance(0.5):
            raise KeyError("x")

    assert finds(case) == ["KeyError: 'x'"]


def test_what_is_not_right_is_a_find() -> None:
    def case(draw: Draw) -> None:
        check(draw.random() < 0.5, "too large")

    assert finds(case) == ["Wrong: too large"]


def test_a_case_that_does_not_end_is_a_find() -> None:
    def case(draw: Draw) -> None:
        while True:
            pass

    assert finds(case, 1) == ["Hung: computing after 0.2 s"]


def test_a_refusal_has_to_be_clear() -> None:
    with refusals():
        raise BadInput("field", 1, "something else")
    for unclear in (BadInput("", 1, "something else"), BadInput("field", 1, "")):
        with pytest.raises(Wrong), refusals():
            raise unclear
    with pytest.raises(ValueError, match="plain"), refusals():
        raise ValueError("plain")


def test_a_case_is_the_same_whenever_it_is_run() -> None:
    drawn: list[tuple[str, float]] = []

    def case(draw: Draw) -> None:
        drawn.append((draw.name, draw.random()))

    target = Target("odd", "", pure(case))
    asyncio.run(run(target, Path(), seed=7, cases=5))
    asyncio.run(run(target, Path(), seed=7, cases=1, first=3))
    assert drawn[5] == drawn[3]
    assert len(set(drawn)) == 5
