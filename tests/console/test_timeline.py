"""The timeline as people use it: zoomed by dragging and by keyboard, and from a peak to its tasks."""

from __future__ import annotations

import re
import time

import pytest
from playwright.sync_api import Page, expect
from tests.console.axe import violations
from tests.console.conftest import Visits
from tests.console.hands import HANDS, Keyboard
from tests.console.serving import Served

pytestmark = pytest.mark.parametrize("store", ["sqlite"], indirect=True, scope="module")

AHEAD = 6 * 3_600
"""Seconds from now to the peak."""


@pytest.fixture(scope="module")
def peak(served: Served) -> int:
    """A second with 300 tasks, in seconds since the epoch, among some for each quarter of an hour."""
    now = int(time.time())
    at = now // 900 * 900 + AHEAD
    asked = [{"topic": "coupon.remind", "key": f"c{number}", "at": written(at)} for number in range(300)]
    asked += [
        {"topic": "order.close", "key": f"o{number}", "at": written(now + 900 * number + 60)} for number in range(80)
    ]
    with served.api() as api:
        api.done("POST", "/v1/schedule", asked)
    return at


def written(at: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def chart(page: Page) -> None:
    expect(page.locator("#timeline-chart canvas")).to_be_visible()


def test_dragging_zooms_in_and_back_is_where_one_was(visits: Visits, peak: int, axe: str) -> None:
    with visits() as visitor:
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
    with visits() as visitor:
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
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"[?&]from="))
        chart(page)
        before = page.url
        Keyboard(page).reach(page.get_by_role("application"))
        page.keyboard.press("Escape")
        page.wait_for_url(lambda url: url != before)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement !== document.body"), "the keyboard is not lost"


@pytest.mark.parametrize("hand", HANDS)
def test_a_peak_says_what_it_needs_and_leads_to_its_tasks(visits: Visits, peak: int, hand: str) -> None:
    with visits() as visitor:
        page = visitor.goto("/")
        using = HANDS[hand](page)
        using.press(page.get_by_role("navigation", name="Pages", exact=True).get_by_role("link", name="Timeline"))
        using.write(page.get_by_label("Tasks a second that your workers do"), "100")
        using.press(page.get_by_role("button", name="Show").first)
        page.wait_for_url(re.compile("rate=100"))
        highest = page.get_by_role("list", name="Peaks").get_by_role("listitem").filter(has_text="coupon.remind")
        expect(highest).to_contain_text("300 tasks in this second")
        expect(highest).to_contain_text("At 100/s the last of them is 3s late")
        expect(highest).to_contain_text("300/s")
        using.press(highest.get_by_role("link", name="Zoom in"))
        page.wait_for_url(re.compile(r"[?&]from="))
        chart(page)
        highest = page.get_by_role("list", name="Peaks").get_by_role("listitem").filter(has_text="coupon.remind")
        using.press(highest.get_by_role("link", name="Show its tasks"))
        expect(page.get_by_text("300 tasks", exact=True)).to_be_visible()


def test_a_topic_alone_and_the_numbers_as_a_table(visits: Visits, peak: int) -> None:
    with visits() as visitor:
        page = visitor.goto("/timeline?span=day&topic=coupon.remind")
        page.get_by_text("The same as a table").click()
        table = page.get_by_role("region", name="Tasks that come due, by time").get_by_role("table")
        expect(table.get_by_role("row").filter(has_text="300").first).to_be_visible()
        expect(table).not_to_contain_text("order.close")
