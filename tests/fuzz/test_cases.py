"""A bug would be found by fuzzing."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from tests.fuzz.cases import Hung, fuzz, refusals, within

from bide.core.errors import BadInput


def test_another_exception_is_found_and_shrunk() -> None:
    @fuzz(100, number=st.integers())
    def case(number: int) -> None:
        with refusals():
            raise BadInput("field", number, "something else") if number < 1_000 else KeyError(number)

    with pytest.raises(KeyError, match="1000"):
        case()


def test_a_case_that_does_not_end_is_found() -> None:
    @within(0.2)
    def case() -> None:
        while True:
            pass

    with pytest.raises(Hung, match=r"0\.2 s"):
        case()


def test_a_refusal_has_to_be_clear() -> None:
    with refusals() as refused:
        raise BadInput("field", 1, "something else")
    assert len(refused) == 1
    for unclear in (BadInput("", 1, "something else"), BadInput("field", 1, "")):
        with pytest.raises(AssertionError), refusals():
            raise unclear
    with pytest.raises(ValueError, match="plain"), refusals():
        raise ValueError("plain")


def test_a_case_is_the_same_whenever_it_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.cases.TIMES", 1.0)
    drawn: list[int] = []

    @fuzz(20, number=st.integers())
    def case(number: int) -> None:
        drawn.append(number)

    case()
    case()
    assert drawn[: len(drawn) // 2] == drawn[len(drawn) // 2 :]
    assert len(set(drawn)) > 5
