"""What may be said of a table: names, conditions, changes, and what is refused with what reason."""

from __future__ import annotations

from typing import Any

import pytest

from bide import BadInput, Sql, TableSource

GIVEN: dict[str, Any] = {"table": "posts", "due": "due", "where": "status = 2", "changes": {"status": 3}}


def test_what_is_left_out() -> None:
    source = TableSource(**GIVEN, columns=["title", "id", "title"])
    assert (source.id, source.page, source.look_every_ms, source.database) == ("id", 100, 1_000, None)
    assert source.loaded == ("id", "title")
    assert source.named == {"id": "id", "due": "due", "status": "changes", "title": "columns"}


def test_what_was_given_can_be_changed_no_more() -> None:
    changes = {"status": 3}
    source = TableSource(**{**GIVEN, "changes": changes})
    changes["status"] = 4
    assert source.changes == {"status": 3}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("table", ""), ("table", "a.b.c"), ("table", 'po"sts'), ("table", 7), ("table", "x" * 64), ("id", "a b\0"),
        ("due", ""), ("due", "a.b"), ("where", ""), ("where", "  "), ("where", None), ("where", "status = 2;"),
        ("where", "status = 2 -- so"), ("where", "status = 2 /* so */"), ("where", "(status = 2"),
        ("where", "status = 2) OR (1 = 1"), ("where", "title = 'open"), ("where", "status = ?"),
        ("where", "status = $1"), ("where", "status = :status"), ("where", "due < :now"), ("where", "a = 'b\\'"),
        ("changes", {}), ("changes", None), ("changes", {"a.b": 1}), ("changes", {"id": 1}),
        ("columns", "title"), ("columns", ["ti'tle", "x\n"]), ("due_is", "hours"), ("zone", "Europe/Berlin"),
        ("page", 0), ("page", 100_000), ("page", True), ("look_every", "0s"), ("look_every", "2h"), ("look_every", 1),
        ("database", 1), ("channel", ""),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field(field: str, value: object) -> None:
    with pytest.raises(BadInput) as raised:
        TableSource(**{**GIVEN, field: value})
    assert raised.value.field == field


@pytest.mark.parametrize(
    "where",
    [
        "status = 2", "(status = 2 OR status = 5) AND NOT deleted", "title = 'a; b -- c ('", "title = 'it''s'",
        '"Status" = 2', "`status` = 2", "meta::jsonb @> '{\"a\": 1}'", "tags[1:2] IS NULL",
        "id IN (SELECT post FROM picks)",
    ],
)  # fmt: skip
def test_conditions_that_are_taken(where: str) -> None:
    assert TableSource(**{**GIVEN, "where": where}).where == where


def test_the_moment_in_an_expression() -> None:
    assert Sql("coalesce(at, :now)").written(lambda: "NOW()") == "coalesce(at, NOW())"
    assert Sql("':now' || x::now || :now").written(lambda: "T") == "':now' || x::now || T"
    for text in ("", "1; DROP TABLE posts", ":later", "(1"):
        with pytest.raises(BadInput):
            Sql(text)
