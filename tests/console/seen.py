"""The pages there are, and what each of them has."""

from __future__ import annotations

from urllib.parse import quote

from playwright.sync_api import Page, expect
from tests.console.serving import GROUP, ODD, ORDERS

PAGES = {
    "overview": "/",
    "timeline": "/timeline",
    "timeline of a month": "/timeline?span=month",
    "tasks": "/tasks",
    "tasks that are dead": "/tasks?state=dead",
    "dead letters": "/dead",
    "topics": "/topics",
    "changes": "/changes",
}
"""Those that are there however much there is."""
OF_TEN = {
    "a task": f"/tasks/order.close/{ORDERS[0]}",
    "a task with an odd name": f"/tasks/post.publish/{quote(ODD, safe='')}",
    "a dead task": "/tasks/payment.notify/n1",
    "a task that is done": "/tasks/coupon.remind/c1",
    "a topic": "/topics/order.close",
    "tasks of a group": f"/tasks?group={GROUP}",
}
TOPIC, KEY, GROUP_FIELD, TO, BY = "Topic", "Key (exact)", "Group", "to", "by a length"
"""What fields are called."""
LANGUAGES = ["en-GB", "zh-CN"]


def titled(page: Page) -> str:
    """The one heading of the first level, which says what the page is."""
    expect(page.locator("h1")).to_have_count(1)
    text = page.locator("h1").inner_text()
    assert text.strip()
    return text


def ended(page: Page) -> None:
    """Until a change to many is over."""
    expect(page.locator("[data-is-over]")).to_contain_text("Ended")
