"""Dead tasks by topic and error: what is one class, what is read of many, and who shares."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.conftest import World, virtual
from tests.insight.dying import let_die

from bide.insight.dead_letters import NO_ERROR, dead_letters, error_class, tasks_of_group


def keyed(errors: Sequence[str | None]) -> dict[str, str | None]:
    """By the keys k0000 and on."""
    return {f"k{place:04}": error for place, error in enumerate(errors)}


@pytest.mark.parametrize(
    ("error", "its_class"),
    [
        ("KeyError: 'order-4711'\nTraceback (most recent call last):", "KeyError: '…'"),
        ("HTTP 503 from https://shop.example/pay/17?x=1 after 3.2 s", "HTTP 503 from (address) after # s"),
        ("answered 404: no order 4711", "answered 404: no order #"),
        ("[Errno 111] Connect call failed ('127.0.0.1', 8080)", "[Errno 111] Connect call failed ('…', #)"),
        ("no connection to 127.0.0.1:8080", "no connection to (address)"),
        ("[::1]:80 refused", "(address) refused"),
        ("cannot tell ann@shop.example, it's 5 days old", "cannot tell (address), it's # days old"),
        ("no user 018f3c5e-aaaa-7bbb-8ccc-0123456789ab", "no user #"),
        ("<Order object at 0x7f21ab>", "<Order object at #>"),
        ("commit deadbeef01 is no facade", "commit # is no facade"),
        ("order-4711 is gone", "order-# is gone"),
        ("1,234.56 is too much", "# is too much"),
        ("HTTP 503.", "HTTP 503."),
        ("error 12345", "error #"),
        ("holder lost", "holder lost"),
        ("  \n", NO_ERROR),
        ("", NO_ERROR),
        (None, NO_ERROR),
        ("a\x00b\u2028c", "a b"),
    ],
)
def test_errors_that_differ_in_names_and_numbers_are_one_class(error: str | None, its_class: str) -> None:
    assert error_class(error) == its_class


@given(st.text(), st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_class_is_one_short_line_that_a_form_can_carry(text: str, one: int, other: int) -> None:
    found = error_class(text)
    assert 0 < len(found) <= 160
    assert found == found.strip()
    assert found.encode().decode() == found
    assert not set("\x00\r\n\t\x1b") & set(found)
    assert error_class(f"no order {one} today") == error_class(f"no order {other} today")


@virtual
async def test_groups_tell_how_many_since_when_and_of_what(world: World) -> None:
    async with world.app() as app:
        await let_die(app, "pay", keyed(["HTTP 503 after 1 s", "HTTP 503 after 2 s", "HTTP 500 after 2 s"]))
        await world.pause(60)
        await let_die(app, "mail", keyed(["HTTP 503 after 1 s"] * 5))
        await let_die(app, "pay", {"late": "HTTP 503 after 77 s"})
        found = await dead_letters(app)
        assert sum(group.number for group in found.groups) == 9
        assert found.partly == frozenset()
        assert {topic: count.number for topic, count in found.totals.items()} == {"pay": 4, "mail": 5}
        told = [(one.topic, one.error, one.number, one.newest - one.oldest) for one in found.groups]
        assert told == [
            ("mail", "HTTP 503 after # s", 5, 0),
            ("pay", "HTTP 503 after # s", 3, 60_000),
            ("pay", "HTTP 500 after # s", 1, 0),
        ]
        assert (found.groups[1].example.key, found.groups[1].first_line) == ("late", "HTTP 503 after 77 s")


@virtual
async def test_topics_share_what_is_looked_at(world: World) -> None:
    async with world.app() as app:
        await let_die(app, "flood", keyed([f"flood {n}" for n in range(900)]))
        await let_die(app, "small", keyed(["other"] * 30))
        await let_die(app, "middle", keyed(["third"] * 120))
        found = await dead_letters(app, most=300)
        assert {one.topic: one.number for one in found.groups} == {"small": 30, "middle": 120, "flood": 150}
        assert found.partly == {"flood"}
        assert found.totals["flood"].number == 900


@virtual
async def test_large_payloads_do_not_fill_the_memory(world: World) -> None:
    async with world.app() as app:
        await let_die(app, "large", keyed([None] * 400), payload="x" * 200_000)
        found = await dead_letters(app)
        assert 50 <= sum(group.number for group in found.groups) <= 150
        assert found.partly == {"large"}
        assert found.groups[0].example.payload == b""


@virtual
async def test_the_tasks_of_a_group_come_page_by_page(world: World) -> None:
    async with world.app() as app:
        await let_die(app, "t", keyed(["rare 1" if n % 50 == 0 else "usual" for n in range(400)]))
        keys: list[str] = []
        cursor: str | None = None
        while True:
            page = await tasks_of_group(app, "t", "rare #", cursor, limit=3)
            keys += [one.key for one in page.tasks]
            cursor = page.cursor
            if cursor is None:
                break
        assert keys == [f"k{n:04}" for n in range(0, 400, 50)]
        assert len((await tasks_of_group(app, "t", None, None, limit=10)).tasks) == 10
        assert (await tasks_of_group(app, "t", "unheard of", None)).tasks == []
