"""Text from outside as it may be shown: nothing in it can move, hide or turn what stands around it.

Templates escape markup. What escaping leaves alone is made visible here: control characters, what reorders text (the
"Trojan source" marks of CVE-2021-42574), what has no width, and halves of surrogate pairs.
"""

from __future__ import annotations

import re
import unicodedata

_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5"
    "\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Every control and format character, every separator of lines, and what else Unicode shows as nothing; but U+FE0F,
which is part of many an emoji."""


def inert(text: str, limit: int | None = None) -> str:
    """`text` with what cannot be seen made visible, and cut at `limit` characters with an ellipsis."""
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return _ODD.sub(_shown, text)


def inert_line(text: str, limit: int | None = None) -> str:
    """The same in one line: line breaks and tabs are shown as well."""
    return inert(text, limit).replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥")


def isolated(text: str, limit: int = 200) -> str:
    """`text` in one line for a place within a sentence, whose direction it cannot turn. Not to be made inert again."""
    return f"\u2068{inert_line(text, limit)}\u2069"


def _shown(match: re.Match[str]) -> str:
    point = ord(match[0])
    if point < 0x20:
        return chr(0x2400 + point)  # the control pictures of Unicode
    if point == 0x7F:
        return "␡"
    return f"[{unicodedata.name(match[0], f'U+{point:04X}')}]"
