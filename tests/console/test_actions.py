"""What is done to tasks: one, a selection, all that match, a group; by mouse and by keyboard, on every store."""

from __future__ import annotations

import re
import secrets
from datetime import datetime, timedelta
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.console.axe import violations
from tests.console.browser import overflow
from tests.console.conftest import Visits
from tests.console.hands import HANDS, Hand
from tests.console.seen import BY, GROUP_FIELD, KEY, TO, TOPIC, ended
from tests.console.serving import GROUP, Served, fill_group

HOUR = timedelta(hours=1)


@pytest.fixture
def topic(served: Served) -> str:
    """One with four tasks, due in one, two, three and four days."""
    found = f"order.{secrets.token_hex(4)}"
    with served.api() as api:
        for number in range(1, 5):
            api.put(found, f"k{number}", delay=f"{number}d", group=f"{found}-owner")
    return found


def tasks(served: Served, topic: str) -> dict[str, Any]:
    """Those of a topic, by key."""
    with served.api() as api:
        found = api.done("GET", f"/v1/tasks?topic={topic}&limit=1000")["tasks"]
        return {task["key"]: task for task in found}


def due(task: Any) -> datetime:
    return datetime.fromisoformat(task["due_at"])


def moved(before: dict[str, Any], after: dict[str, Any]) -> dict[str, timedelta]:
    """How far each was moved, of those that were."""
    return {key: due(after[key]) - due(before[key]) for key in after if due(after[key]) != due(before[key])}


def well(page: Page, axe: str, hand: str = "mouse") -> None:
    """What comes up on the way is as the pages are that one begins with; looked at closely once, by mouse."""
    expect(page.locator("h1")).to_have_count(1)
    assert not overflow(page)
    if hand == "mouse":
        assert not (wrong := violations(page, axe)), "\n".join(wrong)


def search(page: Page, using: Hand, fields: dict[str, str]) -> None:
    """Find tasks, from wherever one is."""
    using.press(page.get_by_role("navigation", name="Pages", exact=True).get_by_role("link", name="Tasks"))
    for label, text in fields.items():
        using.write(page.get_by_role("search").get_by_label(label, exact=True), text)
    using.press(page.get_by_role("button", name="Search"))
    page.wait_for_url("**/tasks?*")


@pytest.mark.parametrize("hand", HANDS)
def test_one_task(visits: Visits, served: Served, axe: str, topic: str, hand: str) -> None:
    before = tasks(served, topic)
    with visits() as visitor:
        page = visitor.goto("/")
        using = HANDS[hand](page)
        search(page, using, {TOPIC: topic, KEY: "k1"})
        using.press(page.get_by_role("link", name="k1", exact=True))
        expect(page.get_by_role("heading", level=1)).to_have_text("k1")

        using.write(page.get_by_label(BY, exact=True), "90m")
        using.press(page.get_by_role("button", name="Shift"))
        expect(page.get_by_role("status").filter(has_text=re.compile("."))).to_be_visible()
        assert moved(before, tasks(served, topic)) == {"k1": timedelta(minutes=90)}
        expect(page.get_by_role("region", name="Changes")).to_contain_text("anonymous")
        well(page, axe, hand)

        using.write(page.get_by_label(TO, exact=True), "2030-07-01 08:00")
        using.press(page.get_by_role("button", name="Move"))
        expect(page.get_by_role("region", name="Times").first).to_contain_text("2030-07-01 08:00:00.000")
        assert tasks(served, topic)["k1"]["due_at"] == "2030-07-01T06:00:00.000Z", "a time of Berlin"

        using.press(page.get_by_role("button", name="Fire now"))
        expect(page.get_by_role("region", name="Times").first).not_to_contain_text("2030-07-01")
        expect(page.get_by_text("due", exact=True)).to_be_visible()

        using.press(page.get_by_role("button", name="Cancel"))
        expect(page.get_by_text("cancelled", exact=True)).to_be_visible()
        expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
        assert tasks(served, topic)["k1"]["state"] == "cancelled"
        well(page, axe, hand)


@pytest.mark.parametrize("hand", HANDS)
def test_a_dead_task_is_sent_again(visits: Visits, served: Served, topic: str, hand: str) -> None:
    with served.api() as api:
        api.dead(topic, "gone")
    with visits() as visitor:
        page = visitor.goto(f"/tasks/{topic}/gone")
        expect(page.get_by_role("region", name="Last error")).to_contain_text("broken")
        HANDS[hand](page).press(page.get_by_role("button", name="Redrive"))
        expect(page.get_by_role("button", name="Fire now")).to_be_visible()
        assert tasks(served, topic)["gone"]["state"] == "waiting"


@pytest.mark.parametrize("hand", HANDS)
def test_a_selection(visits: Visits, served: Served, axe: str, topic: str, hand: str) -> None:
    before = tasks(served, topic)
    with visits() as visitor:
        page = visitor.goto("/tasks")
        using = HANDS[hand](page)
        search(page, using, {TOPIC: topic})
        using.tick(page.get_by_role("checkbox", name="k2"))
        using.tick(page.get_by_role("checkbox", name="k4"))
        expect(page.get_by_text("2 ticked")).to_be_visible()
        using.write(page.get_by_label(BY, exact=True), "1h")
        using.press(page.get_by_role("button", name="Shift"))

        expect(page.get_by_role("region", name="Some of them").get_by_role("row")).to_have_count(3)
        well(page, axe, hand)
        assert not moved(before, tasks(served, topic)), "nothing has happened yet"
        using.press(page.get_by_role("button", name="Shift: 2 tasks"))
        ended(page)
        assert moved(before, tasks(served, topic)) == {"k2": HOUR, "k4": HOUR}
        well(page, axe, hand)
        using.press(page.get_by_role("link", name="All changes"))
        expect(page.get_by_role("row").nth(1)).to_contain_text("Ended")
        well(page, axe, hand)


@pytest.mark.parametrize("hand", HANDS)
def test_all_of_a_page_are_chosen_by_one_box(visits: Visits, served: Served, topic: str, hand: str) -> None:
    with visits() as visitor:
        page = visitor.goto(f"/tasks?topic={topic}&state=waiting")
        using = HANDS[hand](page)
        using.tick(page.get_by_role("checkbox", name="Choose all on this page"))
        expect(page.get_by_text("4 ticked")).to_be_visible()
        using.press(page.get_by_role("button", name="Cancel"))
        using.press(page.get_by_role("link", name="Back, without a change"))
        page.wait_for_url("**/tasks?*")
        assert {task["state"] for task in tasks(served, topic).values()} == {"waiting"}
        using.tick(page.get_by_role("checkbox", name="Choose all on this page"))
        using.press(page.get_by_role("button", name="Cancel"))
        using.press(page.get_by_role("button", name="Cancel: 4 tasks"))
        ended(page)
        assert {task["state"] for task in tasks(served, topic).values()} == {"cancelled"}


@pytest.mark.parametrize("hand", HANDS)
def test_five_hundred_of_a_group_are_moved_by_an_hour(
    visits: Visits, served: Served, axe: str, topic: str, hand: str
) -> None:
    with served.api() as api:
        fill_group(api, 500, topic)
    before = tasks(served, topic)
    with visits() as visitor:
        page = visitor.goto("/")
        using = HANDS[hand](page)
        search(page, using, {TOPIC: topic, GROUP_FIELD: GROUP})
        using.tick(page.get_by_role("radio", name="all that match this search"))
        using.write(page.get_by_label(BY, exact=True), "1h")
        using.press(page.get_by_role("button", name="Shift"))
        expect(page.get_by_text("500 tasks", exact=True)).to_be_visible()
        expect(page.get_by_role("main")).to_contain_text("1h later")
        well(page, axe, hand)
        using.press(page.get_by_role("button", name="Shift: 500 tasks"))
        ended(page)
        expect(page.get_by_role("main")).to_contain_text("500")
    assert moved(before, tasks(served, topic)) == {f"e{number}": HOUR for number in range(500)}


def test_what_changed_meanwhile_is_told_and_nothing_is_done(
    visits: Visits, served: Served, axe: str, topic: str
) -> None:
    before = tasks(served, topic)
    with visits() as visitor:
        page = visitor.goto(f"/tasks/{topic}/k3")
        with served.api() as api:
            api.done("PATCH", f"/v1/topics/{topic}/tasks/k3", {"delay": "10d"})
        with visitor.watch.expecting(409):
            page.get_by_role("button", name="Cancel").click()
            expect(page.get_by_role("alert")).to_contain_text("Not done")
        expect(page.get_by_role("region", name="What happened meanwhile")).to_contain_text("anonymous")
        well(page, axe)
        assert tasks(served, topic)["k3"]["state"] == "waiting"
        assert set(moved(before, tasks(served, topic))) == {"k3"}
        page.get_by_role("button", name="Do it all the same, as it is now").click()
        expect(page.get_by_text("cancelled", exact=True)).to_be_visible()


@pytest.mark.parametrize(("field", "verb"), [(BY, "Shift"), (TO, "Move")])
def test_a_time_that_is_none_is_refused_and_says_what_would_do(
    visits: Visits, served: Served, axe: str, topic: str, field: str, verb: str
) -> None:
    before = tasks(served, topic)
    with visits() as visitor:
        page = visitor.goto(f"/tasks/{topic}/k1")
        page.get_by_label(field, exact=True).fill("half past eight")
        with visitor.watch.expecting(422):
            page.get_by_role("button", name=verb).click()
            expect(page.get_by_role("alert")).to_contain_text("A value is not accepted")
            well(page, axe)
    assert not moved(before, tasks(served, topic))


@pytest.mark.parametrize("hand", HANDS)
def test_a_topic_is_paused_and_resumed(visits: Visits, served: Served, axe: str, topic: str, hand: str) -> None:
    with served.api() as api:
        api.put(topic, "now", delay="0s")
    with visits() as visitor, served.api() as api:
        page = visitor.goto("/")
        using = HANDS[hand](page)
        using.press(page.get_by_role("navigation", name="Pages", exact=True).get_by_role("link", name="Topics"))
        pause = page.get_by_role("button", name=f"Pause {topic}")
        expect(pause).to_be_visible(timeout=20_000)  # the list is looked up every few seconds
        using.press(pause)
        expect(page.get_by_role("status").filter(has_text="It is paused")).to_be_visible()
        expect(page.get_by_role("row").filter(has_text=topic)).to_contain_text("paused")
        well(page, axe, hand)
        assert not api.lease(topic)
        using.press(page.get_by_role("row").filter(has_text=topic).get_by_role("link", name=topic))
        expect(page.get_by_role("heading", name="Paused")).to_be_visible()
        well(page, axe, hand)
        using.press(page.get_by_role("button", name="Resume"))
        expect(page.get_by_role("status").filter(has_text="It is resumed")).to_be_visible()
        assert [task["key"] for task in api.lease(topic, wait="5s")] == ["now"]


def test_a_task_is_changed_without_scripts_too(visits: Visits, served: Served, topic: str) -> None:
    with visits(scripts=False) as visitor:
        page = visitor.goto(f"/tasks?topic={topic}")
        page.get_by_role("checkbox", name="k1").check()
        page.get_by_role("checkbox", name="k2").check()
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("button", name="Cancel: 2 tasks").click()
        ended(page)
        assert {key for key, task in tasks(served, topic).items() if task["state"] == "cancelled"} == {"k1", "k2"}
