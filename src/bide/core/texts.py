"""Text of anything, for people to read: errors, reasons, headers. It cannot raise, and every store can keep it."""

from __future__ import annotations

LONGEST_TEXT = 2_000
"""Characters of an error or a reason that are kept."""
TRACE = "\n\x1f"
"""Between the text of an error and its trace, where a store keeps both as one: no text has it by chance."""


def text_of(anything: object, longest: int = LONGEST_TEXT) -> str:
    """`str` of it, else `repr`, else the name of its type; at most `longest` characters, without NUL and surrogates."""
    for write in (str, repr):
        try:
            return storable(str.__str__(write(anything))[:longest])[:longest]
        except Exception:  # noqa: BLE001 - its own code failed: the next way of writing it is tried
            continue
    return storable(type(anything).__name__)[:longest]


def error_text(error: BaseException) -> str:
    """The type of an error and what it says, as `text_of` writes it."""
    name, said = type(error).__name__, text_of(error)
    return storable(f"{name}: {said}" if said else name)[:LONGEST_TEXT]


def error_parts(kept: str | None) -> tuple[str, str]:
    """The text of an error as a store keeps it, and the trace that follows; empty where there is none."""
    text, _, trace = (kept or "").partition(TRACE)
    return text, trace


def storable(text: str) -> str:
    """`text` in UTF-8 without NUL: what no encoder takes is written as an escape (`\\udce9`, `\\x00`)."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def printable(text: str) -> str:
    """`text` with every character that does not print as its escape: line breaks, controls, lone surrogates."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)
