"""Errors: the tree that the docstring draws, messages that name everything, and that they travel."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from typing import Any

import pytest

from bide.core import errors
from bide.core.errors import BadInput, BadPayload, BideError, MissingExtra, PartlyFailed, StoreError, StoreUnavailable

ALL: list[type[BideError]] = [
    each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, BideError)
]


def test_the_docstring_draws_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn: dict[str, str | None] = {}
    above: list[str] = []
    for line in errors.__doc__.splitlines():
        found = re.match(r"(    [│├└─ ]*)([A-Z]\w+)", line)
        if found:
            depth = (len(found[1]) - 4) // 4
            above = [*above[:depth], found[2]]
            drawn[found[2]] = above[depth - 1] if depth else None
    actual = {each.__name__: None if each is BideError else each.__bases__[0].__name__ for each in ALL}
    assert drawn == actual


def test_bad_input_names_the_field_the_value_and_what_is_accepted() -> None:
    error = BadInput("delay", "soon", "a duration")
    assert str(error) == "delay: 'soon' is not accepted; give a duration"
    assert (error.field, error.value, error.accepted) == ("delay", "soon", "a duration")
    assert isinstance(error, ValueError)


def test_long_values_are_shortened() -> None:
    assert len(str(BadInput("key", "x" * 10_000, "less"))) < 200
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "a list is not accepted" in str(BadInput("payload", deep, "less"))


def test_a_missing_extra_says_how_to_install_it() -> None:
    assert "pip install 'bide[redis]'" in str(MissingExtra("redis", "a redis:// store"))


AWAY = StoreUnavailable("away")


def examples() -> list[BideError]:
    special: dict[type[BideError], BideError] = {
        BadInput: BadInput("delay", "soon", "a duration"),
        BadPayload: BadPayload("payload", b"\xff", "JSON"),
        MissingExtra: MissingExtra("redis", "a redis:// store"),
        PartlyFailed: PartlyFailed(["done", AWAY]),
    }
    return [special[each] if each in special else each("it is away") for each in ALL]


@pytest.mark.parametrize("error", examples(), ids=lambda error: type(error).__name__)
def test_errors_travel_between_processes(error: BideError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert repr(vars(other)) == repr(vars(error))


def test_every_error_is_ours_and_says_what_it_means() -> None:
    assert all(each.__doc__ for each in ALL)
    assert issubclass(StoreUnavailable, StoreError)
    raised = [value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, BaseException)]
    assert raised == ALL
