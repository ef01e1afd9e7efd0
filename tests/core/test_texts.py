"""Text of anything: it cannot raise, and what it gives can be encoded, kept and sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.core.names import LONGEST_TEXT, TRACE, error_parts, error_text, storable, text_of


class Mute:
    def __str__(self) -> str:
        raise ValueError("no words")

    def __repr__(self) -> str:
        return "<Mute>"


class Silent(Mute):
    def __repr__(self) -> str:
        raise LookupError("none here either")


class Number(Exception):
    def __str__(self) -> str:
        return 404  # type: ignore[return-value]


class Shouting(str):
    def __str__(self) -> str:
        raise ValueError("a str that cannot be written")


@pytest.mark.parametrize(
    ("anything", "text"),
    [
        ("plain", "plain"),
        (404, "404"),
        (None, "None"),
        (Mute(), "<Mute>"),
        (Silent(), "Silent"),
        (b"caf\xe9".decode("utf-8", "surrogateescape"), "caf\\udce9"),
        ("a\0b", "a\\x00b"),
        (Number(), "Number()"),
        (Shouting("x"), "'x'"),
    ],
)
def test_anything_becomes_text(anything: object, text: str) -> None:
    assert text_of(anything) == text


def test_an_error_says_its_type() -> None:
    assert error_text(ValueError("no such order")) == "ValueError: no such order"
    assert error_text(ValueError()) == "ValueError"
    assert error_text(Number()) == "Number: Number()"
    assert error_text(ValueError("\ud800")) == "ValueError: \\ud800"


@pytest.mark.parametrize(
    ("kept", "parts"),
    [
        (None, ("", "")),
        ("E: x\nTraceback (most recent call last):\n", ("E: x\nTraceback (most recent call last):\n", "")),
        (f"E: x{TRACE}File{TRACE}", ("E: x", f"File{TRACE}")),
    ],
)
def test_the_trace_is_told_from_the_text_of_the_error(kept: str | None, parts: tuple[str, str]) -> None:
    assert error_parts(kept) == parts


@given(st.text(st.characters(exclude_categories=[])), st.integers(1, 50))
def test_what_is_kept_can_be_encoded_and_has_a_bound(text: str, longest: int) -> None:
    kept = text_of(text, longest)
    assert len(kept) <= longest
    assert "\0" not in kept
    assert kept.encode().decode() == kept
    assert storable(kept) == kept
    assert len(error_text(ValueError(text * LONGEST_TEXT))) <= LONGEST_TEXT
