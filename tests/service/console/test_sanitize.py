"""Text from outside is shown as it is, and nothing in it moves, hides or turns what stands around it."""

from __future__ import annotations

import sys
import unicodedata
from html import unescape

from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape

from bide.service.console.rendering import inert, inert_line, isolated

UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
ANY = st.text(st.characters(codec=None), max_size=60)


def test_every_character_that_cannot_be_seen_is_shown() -> None:
    for point in range(sys.maxunicode + 1):
        letter = chr(point)
        if unicodedata.category(letter) in UNSEEN and letter not in "\n\t":
            assert inert(letter) != letter, f"U+{point:04X}"
    for letter in "\u034f\u115f\u17b4\u2800\u3164\uffa0\ufe00\U000e0100\U000e01ef":
        assert inert(letter) != letter, f"U+{ord(letter):04X}"


def test_what_can_be_seen_stays() -> None:
    for text in ("order-42", "Bestellung Größe", "订单 42", "ملاحظة", "❤\ufe0f", "<b>&'\"", "a\tb\nc"):
        assert inert(text) == text


@given(ANY)
def test_what_is_shown_is_harmless_and_stays_so(text: str) -> None:
    payload_view = inert(text)
    assert not [one for one in payload_view if unicodedata.category(one) in UNSEEN and one not in "\n\t"]
    assert inert(payload_view) == payload_view
    payload_view.encode()


@given(ANY)
def test_a_line_is_one_line(text: str) -> None:
    payload_view = inert_line(text)
    assert len(payload_view.splitlines()) <= 1
    assert "\t" not in payload_view


@given(ANY, st.integers(1, 30))
def test_what_is_long_is_cut(text: str, limit: int) -> None:
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    assert inert(text, limit) == inert(cut)
    assert ("…" in inert(text, limit)) or len(text) <= limit


@given(ANY)
def test_a_sentence_keeps_its_direction(text: str) -> None:
    payload_view = isolated(text)
    assert payload_view[0] + payload_view[-1] == "\u2068\u2069"
    assert payload_view[1:-1] == inert_line(text, 200)


@given(ANY)
def test_markup_comes_back_as_text(text: str) -> None:
    escaped = str(escape(inert(text)))
    assert not set(escaped) & set("<>\"'")
    assert unescape(escaped) == inert(text)
