"""Dead letters: grouped by what killed them, and sent again: one, some, all; by mouse and by keyboard."""

from __future__ import annotations

import secrets

import pytest
from playwright.sync_api import expect
from tests.console.conftest import Visits
from tests.console.hands import HANDS
from tests.console.seen import ended
from tests.console.serving import Served
from tests.service.calling import Api


def die(api: Api, topic: str, errors: dict[str, str]) -> None:
    """Tasks of `topic` by key, each dead of its error."""
    for key, error in errors.items():
        api.put(topic, key, delay="0s")
        [task] = api.lease(topic)
        assert api.settle(task, "dead", error=error)


@pytest.fixture
def topic(served: Served) -> str:
    """One with five dead tasks, four of one kind of error."""
    found = f"notify.{secrets.token_hex(4)}"
    with served.api() as api:
        errors = {f"n{number}": f"merchant {number} answered 503" for number in range(4)}
        die(api, found, {**errors, "bad": "the signature is wrong"})
    return found


def waiting(served: Served, topic: str) -> set[str]:
    with served.api() as api:
        return {task["key"] for task in api.done("GET", f"/v1/tasks?topic={topic}&state=waiting")["tasks"]}


@pytest.mark.parametrize("hand", HANDS)
def test_a_group_a_few_and_one(visits: Visits, served: Served, topic: str, hand: str) -> None:
    with visits() as visitor:
        page = visitor.goto("/")
        using = HANDS[hand](page)
        using.press(page.get_by_role("navigation", name="Pages", exact=True).get_by_role("link", name="Dead letters"))
        using.press(page.get_by_role("link", name="Look again"))  # the page may be as old as it says
        using.press(page.get_by_role("link", name=f"Groups: {topic}"))
        rows = page.get_by_role("region", name="Groups").get_by_role("row")
        expect(rows).to_have_count(3)
        expect(rows.filter(has_text="503").get_by_role("cell").nth(2)).to_have_text("4")

        # one of its kind, at once
        using.press(rows.filter(has_text="signature").get_by_role("button", name="Redrive the example alone"))
        expect(page.get_by_role("heading", level=1)).to_have_text("Dead letters")
        assert waiting(served, topic) == {"bad"}

        # two that are ticked, after a look at them
        page = visitor.goto(f"/dead?topic={topic}")
        using = HANDS[hand](page)
        using.press(page.get_by_role("link", name="Choose some of"))
        using.tick(page.get_by_role("checkbox", name="n0"))
        using.tick(page.get_by_role("checkbox", name="n2"))
        using.press(page.get_by_role("button", name="Redrive those that are ticked"))
        expect(page.get_by_text("2 tasks", exact=True)).to_be_visible()
        assert waiting(served, topic) == {"bad"}, "nothing has happened yet"
        using.press(page.get_by_role("button", name="Redrive: 2 tasks"))
        ended(page)
        assert waiting(served, topic) == {"bad", "n0", "n2"}

        # what is left of the group, at a pace
        page = visitor.goto(f"/dead?topic={topic}&fresh=yes")
        using = HANDS[hand](page)
        using.press(page.get_by_role("button", name="Redrive all of:"))
        using.write(page.get_by_label("Pace: tasks per second"), "50")
        using.press(page.get_by_role("button", name="Redrive: 2 tasks"))
        ended(page)
        expect(page.get_by_role("main")).to_contain_text("50 per second")
        assert waiting(served, topic) == {"bad", "n0", "n1", "n2", "n3"}
        with served.api() as api:
            assert api.get(topic, "n1")["attempt"] == 0, "a new life"
