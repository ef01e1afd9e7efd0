"""What only a browser can tell of what people do: by keyboard, by dragging, with many rows, while pages live."""

from __future__ import annotations

import re
import secrets
import time
from datetime import datetime, timedelta
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.console.axe import violations
from tests.console.browser import overflow
from tests.console.conftest import Visits
from tests.console.hands import Keyboard
from tests.console.seen import BY, KEY, TO, TOPIC, ended
from tests.service.calling import Api, Running, at, running
from tests.service.test_access import make, tokens_of
from tests.waiting import PATIENCE

from bide.service.access import FRESH

HOUR = timedelta(hours=1)


@pytest.fixture
def topic(api: Api) -> str:
    """One with four tasks, due in one, two, three and four days."""
    found = f"order.{secrets.token_hex(4)}"
    for number in range(1, 5):
        api.put(found, f"k{number}", delay=f"{number}d", group=f"{found}-owner")
    return found


def tasks(api: Api, topic: str) -> dict[str, Any]:
    """Those of a topic, by key."""
    return {task["key"]: task for task in api.done("GET", f"/v1/tasks?topic={topic}&limit=1000")["tasks"]}


def moved(before: dict[str, Any], after: dict[str, Any]) -> dict[str, timedelta]:
    """How far each was moved, of those that were."""

    def due(task: Any) -> datetime:
        return datetime.fromisoformat(task["due_at"])

    return {key: due(after[key]) - due(before[key]) for key in after if due(after[key]) != due(before[key])}


def well(page: Page, axe: str) -> None:
    """What comes up on the way is as the pages are that one begins with."""
    expect(page.locator("h1")).to_have_count(1)
    assert not overflow(page)
    assert not (wrong := violations(page, axe)), "\n".join(wrong)


def test_one_task_from_the_search_on_by_keyboard(visits: Visits, api: Api, axe: str, topic: str) -> None:
    before = tasks(api, topic)
    with visits() as visitor:
        page = visitor.goto("/")
        keyboard = Keyboard(page)
        keyboard.press(page.get_by_role("navigation", name="Pages", exact=True).get_by_role("link", name="Tasks"))
        for label, text in ((TOPIC, topic), (KEY, "k1")):
            keyboard.write(page.get_by_role("search").get_by_label(label, exact=True), text)
        keyboard.press(page.get_by_role("button", name="Search"))
        keyboard.press(page.get_by_role("link", name="k1", exact=True))
        expect(page.get_by_role("heading", level=1)).to_have_text("k1")

        keyboard.write(page.get_by_label(BY, exact=True), "90m")
        keyboard.press(page.get_by_role("button", name="Shift"))
        expect(page.get_by_role("status").filter(has_text=re.compile("."))).to_be_visible()
        assert moved(before, tasks(api, topic)) == {"k1": timedelta(minutes=90)}
        expect(page.get_by_role("region", name="Changes")).to_contain_text("anonymous")
        well(page, axe)

        page.get_by_label(TO, exact=True).fill("2030-07-01 08:00")
        page.get_by_role("button", name="Move").click()
        expect(page.get_by_role("region", name="Times").first).to_contain_text("2030-07-01 08:00:00.000")
        assert tasks(api, topic)["k1"]["due_at"] == "2030-07-01T06:00:00.000Z", "a time of Berlin"

        page.get_by_role("button", name="Fire now").click()
        expect(page.get_by_role("region", name="Times").first).not_to_contain_text("2030-07-01")
        expect(page.get_by_text("due", exact=True)).to_be_visible()

        page.get_by_role("button", name="Cancel").click()
        expect(page.get_by_text("cancelled", exact=True)).to_be_visible()
        expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
        assert tasks(api, topic)["k1"]["state"] == "cancelled"
        well(page, axe)


def test_all_of_a_page_and_all_that_match_by_keyboard(visits: Visits, api: Api, axe: str, topic: str) -> None:
    before = tasks(api, topic)
    with visits() as visitor:
        page = visitor.goto(f"/tasks?topic={topic}&state=waiting")
        keyboard = Keyboard(page)
        keyboard.tick(page.get_by_role("checkbox", name="Choose all on this page"))
        expect(page.get_by_text("4 ticked")).to_be_visible()
        keyboard.press(page.get_by_role("button", name="Cancel"))
        expect(page.get_by_role("button", name="Cancel: 4 tasks")).to_be_visible()
        page.go_back()
        expect(page.get_by_text("4 ticked")).to_be_visible()
        page.get_by_role("button", name="Cancel").click()
        keyboard.press(page.get_by_role("link", name="Back without a change"))
        page.wait_for_url("**/tasks?*")
        assert {task["state"] for task in tasks(api, topic).values()} == {"waiting"}

        keyboard.tick(page.get_by_role("radio", name="all that match this search"))
        keyboard.write(page.get_by_label(BY, exact=True), "1h")
        keyboard.press(page.get_by_role("button", name="Shift"))
        expect(page.get_by_role("main")).to_contain_text("1h later")
        expect(page.get_by_role("region", name="Some of them").get_by_role("row")).to_have_count(5)
        well(page, axe)
        assert not moved(before, tasks(api, topic)), "nothing has happened yet"
        keyboard.press(page.get_by_role("button", name="Shift: 4 tasks"))
        ended(page)
        assert moved(before, tasks(api, topic)) == dict.fromkeys(before, HOUR)
        well(page, axe)
        page.get_by_role("link", name="All changes").click()
        expect(page.get_by_role("row").nth(1)).to_contain_text("Ended")
        well(page, axe)


def test_what_is_refused_says_so_where_one_is(visits: Visits, api: Api, axe: str, topic: str) -> None:
    before = tasks(api, topic)
    with visits() as visitor:
        page = visitor.goto(f"/tasks/{topic}/k3")
        page.get_by_label(BY, exact=True).fill("half past eight")
        with visitor.watch.expecting(422):
            page.get_by_role("button", name="Shift").click()
            expect(page.get_by_role("alert")).to_contain_text("A value is not accepted")
            well(page, axe)
        assert not moved(before, tasks(api, topic))

        page = visitor.goto(f"/tasks/{topic}/k3")
        api.done("PATCH", f"/v1/topics/{topic}/tasks/k3", {"delay": "10d"})
        with visitor.watch.expecting(409):
            page.get_by_role("button", name="Cancel").click()
            expect(page.get_by_role("alert")).to_contain_text("Not done")
        expect(page.get_by_role("region", name="What happened in the meantime")).to_be_visible()
        well(page, axe)
        assert tasks(api, topic)["k3"]["state"] == "waiting"
        page.get_by_role("button", name="Do it anyway, to the task as it is now").click()
        expect(page.get_by_text("cancelled", exact=True)).to_be_visible()


def test_an_open_page_keeps_itself_fresh(visits: Visits, api: Api, topic: str) -> None:
    with visits() as visitor:
        page = visitor.goto("/topics")
        later = page.get_by_role("link", name=f"{topic}.later")
        expect(later).to_have_count(0)
        api.put(f"{topic}.later", "k")
        expect(later).to_be_visible()


def test_what_somebody_opened_stays_open_on_a_page_that_keeps_itself_fresh(
    visits: Visits, api: Api, axe: str, topic: str
) -> None:
    api.put(topic, "failed", delay="0s")
    [task] = api.lease(topic)
    assert api.settle(task, "retry", error="E: x\n\x1fFile x\n", delay="1h")
    with visits() as visitor:
        page = visitor.goto(f"/tasks/{topic}/failed")
        trace = page.get_by_role("region", name="Trace")
        expect(trace).not_to_be_visible()
        page.get_by_text("Trace", exact=True).click()
        expect(trace).to_have_text("File x\n")
        page.locator("h1").click()  # what is inside keeps its focus no more
        api.done("PATCH", at(topic, "failed"), {"delay": "2h"})
        expect(page.get_by_text("reschedule: moved")).to_be_visible()
        expect(trace).to_be_visible()
        well(page, axe)


def test_a_page_says_in_words_since_when_there_is_no_answer(visits: Visits) -> None:
    with running("memory:") as one, visits(one) as visitor:
        page = visitor.goto("/")
        silence = page.locator("#silence")
        expect(silence).to_have_text("")
        assert page.evaluate("htmx.config.timeout") > 0, "a service that says nothing is away too"
        page.context.set_offline(True)
        expect(silence).to_contain_text("No answer since", timeout=PATIENCE * 1_000)
        expect(silence).to_have_attribute("aria-live", "assertive")
        expect(page.locator(".away")).to_have_count(1)
        page.context.set_offline(False)
        expect(silence).to_have_text("", timeout=PATIENCE * 1_000)
        faults = visitor.watch.faults
        faults[:] = [one for one in faults if "DISCONNECTED" not in one and "htmx:" not in one]


def test_one_logs_in_by_keyboard_and_an_open_page_ends_with_its_token(visits: Visits, axe: str) -> None:
    """The part that keeps itself fresh leads to the login, once the service knows."""
    with running("memory:") as one, visits(one) as visitor:
        token, header = one.run(make(one.app, "anna"))
        one.run(make(one.app, "bo"))
        one.run(one.app.schedule("order.close", key="4711", delay="1h"))
        page = visitor.goto("/tasks?topic=order.close")
        assert visitor.path == "/login"
        well(page, axe)
        keyboard = Keyboard(page)
        with visitor.watch.expecting(401):
            for text in ("not a token", header.removeprefix("Bearer ")):
                keyboard.write(page.get_by_label("Token"), text)
                keyboard.press(page.get_by_role("button", name="Log in"))
                if text == "not a token":
                    expect(page.get_by_role("alert")).to_be_visible()
                    well(page, axe)
            expect(page.get_by_role("link", name="4711")).to_be_visible()
            assert visitor.path == "/tasks"
            expect(page.get_by_role("banner")).to_contain_text("anna")
            page = visitor.goto("/")

            async def revoke() -> None:
                await tokens_of(one.app).revoke(token.id)

            one.run(revoke())
            one.serving.service._access._read_at -= FRESH  # what is known of the tokens is as old as it may get
            expect(page.get_by_label("Token")).to_be_visible()


# --- the timeline


@pytest.fixture(scope="module")
def peak(one: Running) -> int:
    """A second with 300 tasks, six hours ahead, in seconds since the epoch, among some for each quarter of an hour."""
    now = int(time.time())
    at = now // 900 * 900 + 6 * 3_600
    asked = [{"topic": "coupon.remind", "key": f"c{number}", "at": written(at)} for number in range(300)]
    asked += [
        {"topic": "order.close", "key": f"o{number}", "at": written(now + 900 * number + 60)} for number in range(80)
    ]
    api = Api(one.url)
    api.done("POST", "/v1/schedule", asked)
    api.close()
    return at


def written(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def chart(page: Page) -> None:
    expect(page.locator("#timeline-chart canvas")).to_be_visible()


def test_dragging_zooms_in_and_back_is_where_one_was(visits: Visits, peak: int, axe: str) -> None:
    with visits(still=True) as visitor:
        page = visitor.goto("/timeline?span=day")
        chart(page)
        over = page.locator("#timeline-chart .u-over").bounding_box()
        assert over is not None
        middle = over["y"] + over["height"] / 2
        page.mouse.move(over["x"] + over["width"] * 0.4, middle)
        page.mouse.down()
        page.mouse.move(over["x"] + over["width"] * 0.6, middle, steps=5)
        page.mouse.up()
        page.wait_for_url(re.compile(r"[?&]from="))
        chart(page)
        expect(page.get_by_label("From", exact=True)).to_be_visible()
        assert not violations(page, axe)
        page.go_back()
        page.wait_for_url("**/timeline?span=day")
        expect(page.get_by_role("link", name="Day", exact=True)).to_have_attribute("aria-current", "true")


def test_arrows_go_from_bar_to_bar_enter_zooms_in_and_escape_out(visits: Visits, peak: int) -> None:
    with visits(still=True) as visitor:
        page = visitor.goto("/timeline?span=day")
        chart(page)
        Keyboard(page).reach(page.get_by_role("application"))
        said = page.locator("#said")
        page.keyboard.press("ArrowRight")
        expect(said).not_to_be_empty()
        first = said.inner_text()
        page.keyboard.press("ArrowRight")
        expect(said).not_to_have_text(first)
        page.keyboard.press("ArrowLeft")
        expect(said).to_have_text(first)
        while (bar := said.inner_text()).endswith(": 0 tasks"):  # just before the next bar begins the first is empty
            page.keyboard.press("ArrowRight")
            expect(said).not_to_have_text(bar)
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"[?&]from="))
        chart(page)
        before = page.url
        Keyboard(page).reach(page.get_by_role("application"))
        page.keyboard.press("Escape")
        page.wait_for_url(lambda url: url != before)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement !== document.body"), "the keyboard is not lost"


def test_a_peak_leads_to_its_tasks_by_keyboard(visits: Visits, peak: int) -> None:
    with visits() as visitor:
        page = visitor.goto("/timeline")
        keyboard = Keyboard(page)
        keyboard.write(page.get_by_label("Tasks per second that your workers handle"), "100")
        keyboard.press(page.get_by_role("button", name="Show").first)
        page.wait_for_url(re.compile("rate=100"))
        highest = page.get_by_role("list", name="Peaks").get_by_role("listitem").filter(has_text="coupon.remind")
        expect(highest).to_contain_text("At 100/s the last of them is 3s late")
        keyboard.press(highest.get_by_role("link", name="Zoom in"))
        page.wait_for_url(re.compile(r"[?&]from="))
        chart(page)
        highest = page.get_by_role("list", name="Peaks").get_by_role("listitem").filter(has_text="coupon.remind")
        keyboard.press(highest.get_by_role("link", name="Show its tasks"))
        expect(page.get_by_text("300 tasks", exact=True)).to_be_visible()
