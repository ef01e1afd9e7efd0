"""Which series an expression of Prometheus asks for, by which labels. Not a parser, but enough of one for ours."""

from __future__ import annotations

import re
from typing import NamedTuple

_WORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "bool", "offset", "group_left", "group_right"}
_SELECTOR = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)\s*(?:\{(?P<matchers>[^}]*)\}|(?P<call>\()|)")
_MATCHER = re.compile(r'(?P<label>\w+)\s*(?P<operator>=~|!~|!=|=)\s*"(?P<value>[^"]*)"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")


class Matcher(NamedTuple):
    label: str
    operator: str
    value: str

    def takes(self, value: str) -> bool:
        if self.operator in ("=", "!="):
            return (self.value == value) is (self.operator == "=")
        return bool(re.fullmatch(self.value, value)) is (self.operator == "=~")


class Selector(NamedTuple):
    name: str
    matchers: list[Matcher]


def selectors_of(expression: str) -> list[Selector]:
    """All series that `expression` selects."""
    found = []
    text = re.sub(r"\[[^\]]*\]", "", _GROUPING.sub("", expression))
    for match in _SELECTOR.finditer(text):
        if (
            match["call"] is None
            and match["name"] not in _WORDS
            and not text[: match.start()].endswith(tuple("0123456789"))
        ):
            matchers = [Matcher(*one.groups()) for one in _MATCHER.finditer(match["matchers"] or "")]
            found.append(Selector(match["name"], matchers))
    return found


def labels_grouped_by(expression: str) -> set[str]:
    """The labels in `by (...)` and the like."""
    return {name.strip() for group in _GROUPING.findall(expression) for name in group.split(",")}
