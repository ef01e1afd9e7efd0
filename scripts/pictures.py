"""Takes the pictures of docs/console.md from a running console: scripts/pictures.py [URL] [FOLDER].

    make run                                       in one terminal, for some minutes, so that something has happened
    .venv/bin/python scripts/pictures.py           in another; http://127.0.0.1:8420 into docs/console

It needs what the tests need: `scripts/setup test` and Chromium. It moves the 500 tasks of the group event-summer by an
hour, since that is one of the pictures. A picture has at most 150 kB: 256 colours are enough for a page.
"""

from __future__ import annotations

import io
import json
import sys
import urllib.request
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from PIL import Image  # noqa: E402 - of the tests' environment, as all that follows
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402
from tests.console.browser import NARROW, Scheme, launch  # noqa: E402
from tests.console.seen import BY, KEY  # noqa: E402

from bide_proofs.servers.services import chromium  # noqa: E402

GROUP = "event-summer"
_MOST = 150_000
_WIDE = 1280
_ZONE = "Asia/Shanghai"
_TALLEST = 1_400


class Camera:
    """Takes pictures of one console into a folder."""

    def __init__(self, browser: Browser, url: str, folder: Path) -> None:
        self._browser = browser
        self._url = url
        self._folder = folder

    def page(self, *, narrow: bool = False, scheme: Scheme = "light", locale: str = "en-GB") -> Page:
        """A visitor of their own."""
        width, height = NARROW if narrow else (_WIDE, 900)
        context = self._browser.new_context(
            base_url=self._url, viewport={"width": width, "height": height}, color_scheme=scheme, locale=locale,
            timezone_id=_ZONE, reduced_motion="reduce", device_scale_factor=1,
        )  # fmt: skip
        context.add_cookies([{"name": "bide_zone", "value": _ZONE, "url": self._url}])
        return context.new_page()

    def take(self, page: Page, name: str, *, tallest: int = _TALLEST) -> None:
        """The page from its top, as long as it is or as a picture may be."""
        page.evaluate("() => { document.activeElement && document.activeElement.blur(); scrollTo(0, 0); }")
        height = min(tallest, page.evaluate("Math.ceil(document.querySelector('main').getBoundingClientRect().bottom)"))
        width = page.evaluate("document.documentElement.clientWidth")
        self._keep(page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": width, "height": height}), name)

    def take_window(self, page: Page, name: str) -> None:
        """Take a picture of the window, from its top."""
        page.evaluate("scrollTo(0, 0)")
        self._keep(page.screenshot(), name)

    def _keep(self, raw: bytes, name: str) -> None:
        small = io.BytesIO()
        plain = Image.open(io.BytesIO(raw)).convert("RGB")
        plain.quantize(256, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
        if len(small.getvalue()) > _MOST:
            raise SystemExit(f"scripts/pictures.py: {name} has {len(small.getvalue()):,} bytes, more than {_MOST:,}")
        (self._folder / f"{name}.png").write_bytes(small.getvalue())
        print(f"{name}.png: {plain.width} x {plain.height}, {len(small.getvalue()):,} bytes")


def asked(url: str, path: str) -> Any:
    """The answer of the API."""
    with urllib.request.urlopen(url + path, timeout=10) as reply:
        return json.load(reply)


def latest_order(url: str) -> str:
    """The key of the order of a sale that was closed the latest after it was due, of those that are remembered."""
    cursor = ""
    found: list[tuple[timedelta, str]] = []
    while True:
        page = asked(url, f"/v1/tasks?topic=order.close&state=done&limit=1000{cursor}")
        found += [(_late(task), task["key"]) for task in page["tasks"] if task["payload"].get("sale")]
        if not page.get("cursor"):
            break
        cursor = f"&cursor={quote(page['cursor'])}"
    if not found:
        raise SystemExit("scripts/pictures.py: no order of a sale was closed yet; let the demo run for some minutes")
    return max(found)[1]


def _late(task: Any) -> timedelta:
    return datetime.fromisoformat(task["finished_at"]) - datetime.fromisoformat(task["due_at"])


def overview(camera: Camera) -> None:
    page = camera.page()
    page.goto("/")
    page.wait_for_timeout(5_000)  # so that it has been refreshed
    camera.take(page, "overview")


def late_order(camera: Camera, url: str) -> None:
    """Story one: from what the customer says, the number of the order, to why it closed late."""
    key = latest_order(url)
    page = camera.page()
    page.goto("/tasks")
    page.get_by_label(KEY, exact=True).fill(key)
    page.get_by_role("button", name="Search").click()
    found = page.get_by_role("row").filter(has_text="order.close").get_by_role("link", name=key, exact=True)
    expect(found).to_be_visible()
    camera.take(page, "search")
    found.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(key)
    camera.take(page, "late-order", tallest=1_000)
    page = camera.page(narrow=True, locale="zh-CN")
    page.goto(f"/tasks/order.close/{quote(key, safe='')}")
    camera.take(page, "late-order-narrow-zh", tallest=1_100)


def peak(camera: Camera) -> None:
    """Story two: tomorrow's peak, and what it needs."""
    page = camera.page()
    page.goto("/")
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Timeline").click()
    page.locator("#timeline-day").click()
    drawn(page)
    camera.take(page, "timeline")
    page.locator("#timeline-month").click()
    expect(page.locator("#timeline-month")).to_have_attribute("aria-current", "true")
    coupons = page.locator(".timeline-peaks li").filter(has_text="coupon.remind").first
    coupons.get_by_role("link", name="Zoom in").click()
    expect(page.locator("#timeline-out")).to_be_visible()
    drawn(page)
    camera.take(page, "peak")
    page = camera.page(narrow=True, scheme="dark")
    page.goto("/timeline?span=day")
    drawn(page)
    camera.take(page, "timeline-narrow-dark", tallest=1_100)


def drawn(page: Page) -> None:
    """Until the chart is there, with the past that it tells of."""
    expect(page.locator("#timeline-chart canvas")).to_be_visible()
    page.wait_for_timeout(6_000)  # the past is read in the background, and the page asks again after five seconds
    expect(page.locator("#timeline-chart canvas")).to_be_visible()


def by_an_hour(camera: Camera) -> None:
    """Story three: five hundred tasks of a group, moved by an hour."""
    page = camera.page()
    page.goto(f"/tasks?group={GROUP}")
    page.get_by_role("radio", name="all that match this search").check()
    page.get_by_label(BY, exact=True).fill("1h")
    camera.take_window(page, "group")
    page.get_by_role("button", name="Shift").click()
    expect(page.get_by_text("500 tasks", exact=True)).to_be_visible()
    camera.take(page, "preview", tallest=900)
    page.get_by_role("button", name="Shift: 500 tasks").click()
    expect(page.locator("[data-is-over]")).to_contain_text("Ended")
    camera.take(page, "moved")


def others(camera: Camera) -> None:
    """Make the tasks that the stories do not need."""
    page = camera.page()
    page.goto("/dead")
    camera.take(page, "dead-letters", tallest=900)
    page.goto("/topics")
    camera.take(page, "topics", tallest=900)
    page.get_by_role("region", name="Topics").get_by_role("link", name="payment.notify", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("payment.notify")
    camera.take(page, "topic")


def main(words: list[str]) -> int:
    """The exit code."""
    url = words[0] if words else "http://127.0.0.1:8420"
    folder = Path(words[1]) if len(words) > 1 else ROOT / "docs" / "console"
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = launch(playwright, chromium())
        camera = Camera(browser, url, folder)
        overview(camera)
        late_order(camera, url)
        peak(camera)
        by_an_hour(camera)
        others(camera)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
