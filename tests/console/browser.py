"""Pages in a real browser, and what they must not do: a watch is kept over all that a test opens.

A test that uses these has no asyncio of its own: the browser is driven by playwright's synchronous calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Locator,
    Page,
    Playwright,
    Request,
    Response,
    WebError,
    expect,
)
from tests.waiting import PATIENCE, wait_until

_MOST = 1_000 * PATIENCE
"""Milliseconds that anything may take."""
expect.set_options(timeout=_MOST)
WIDE = (1280, 900)
NARROW = (390, 844)
Scheme = Literal["light", "dark"]

_TELLS = """document.addEventListener("securitypolicyviolation", event =>
  console.error("against the policy: " + event.violatedDirective + " " + event.blockedURI));"""


def launch(playwright: Playwright, program: str) -> Browser:
    """The browser, without a window. It reaches this machine and nothing else."""
    return playwright.chromium.launch(
        executable_path=program,
        timeout=_MOST,
        args=["--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"],
    )


class Watch:
    """What happened in the pages of one context that must not happen."""

    def __init__(self, context: BrowserContext, origin: str) -> None:
        self.faults: list[str] = []
        self.asked: list[str] = []
        """The address of every request."""
        self._origin = origin
        self._expected: set[int] = set()
        context.add_init_script(_TELLS)
        context.on("console", self._said)
        context.on("weberror", self._raised)
        context.on("request", self._requested)
        context.on("requestfailed", self._failed)
        context.on("response", self._answered)

    @contextmanager
    def expecting(self, *statuses: int) -> Iterator[None]:
        """Answers with these statuses are what the test is about."""
        before, self._expected = self._expected, {*self._expected, *statuses}
        yield
        self._expected = before

    def check(self) -> None:
        """Nothing of that has happened since it was asked last."""
        faults, self.faults = self.faults, []
        assert not faults, "\n".join(faults)

    def _said(self, message: ConsoleMessage) -> None:
        refused = any(f"status of {status}" in message.text for status in self._expected)
        if message.type in ("error", "warning") and not refused:
            self.faults.append(f"console: {message.text}")

    def _raised(self, error: WebError) -> None:
        self.faults.append(f"script: {error.error}")

    def _requested(self, request: Request) -> None:
        self.asked.append(request.url)
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "about") and f"{parts.scheme}://{parts.netloc}" != self._origin:
            self.faults.append(f"a request to elsewhere: {request.url}")

    def _failed(self, request: Request) -> None:
        # what a page that is left had asked for is given up by the browser
        if request.failure != "net::ERR_ABORTED":
            self.faults.append(f"failed: {request.method} {request.url}: {request.failure}")

    def _answered(self, response: Response) -> None:
        if response.status >= 400 and response.status not in self._expected:
            self.faults.append(f"{response.status}: {response.request.method} {response.url}")


class Visitor:
    """Somebody with a browser of their own: their page, and the watch over it."""

    def __init__(self, page: Page, watch: Watch, origin: str) -> None:
        self.page = page
        self.watch = watch
        self.origin = origin

    def goto(self, path: str) -> Page:
        """Open the page at this path; it is there, and its scripts have begun."""
        self.page.goto(self.origin + path)
        return self.page

    @property
    def path(self) -> str:
        return urlsplit(self.page.url).path


@contextmanager
def visitor(
    browser: Browser,
    origin: str,
    *,
    size: tuple[int, int] = WIDE,
    scheme: Scheme = "light",
    locale: str = "en-GB",
    zone: str = "Europe/Berlin",
    scripts: bool = True,
    first: bool = False,
    still: bool = False,
) -> Iterator[Visitor]:
    """In the end nothing must have happened that must not: see `Watch`.

    Somebody who is there for the `first` time gets each page twice at first: the browser has to tell its zone. Where it
    is `still`, pages do not look for news, so that they are the same however long one looks at them.
    """
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, locale=locale, timezone_id=zone,
        java_script_enabled=scripts, reduced_motion="reduce",
    )  # fmt: skip
    try:
        context.set_default_timeout(_MOST)
        if still:
            context.add_init_script("window.setInterval = () => 0;")
        if not first:
            context.add_cookies([{"name": "bide_zone", "value": zone, "url": origin}])
        watch = Watch(context, origin)
        found = Visitor(context.new_page(), watch, origin)
        yield found
        watch.check()
    finally:
        context.close()


def overflow(page: Page) -> str:
    """What makes the page as a whole wider than the window, also once it had time to fit in; empty if nothing does."""
    with suppress(AssertionError):  # a chart is drawn anew after the window has changed its size
        wait_until(lambda: not _overflow(page), "the page to fit in")
    return _overflow(page)


def _overflow(page: Page) -> str:
    found: str = page.evaluate("""() => {
      const width = document.documentElement.clientWidth;
      if (document.documentElement.scrollWidth <= width) return "";
      const wide = [...document.querySelectorAll("main *, header *")].filter(one =>
        one.getBoundingClientRect().right > width + 1 && !one.closest(".scroll, pre"));
      return "wider than " + width + ": " + wide.slice(0, 5).map(one => one.outerHTML.slice(0, 160)).join(" | ");
    }""")
    return found


@dataclass(frozen=True, slots=True)
class Stop:
    """Where the keyboard is."""

    place: int
    """From the top of the document, in the order in which it is read."""
    what: str
    seen: bool
    """Within the window, of some size, and with nothing above it."""
    marked: bool
    """With an outline, so that one sees where one is."""
    reached: bool
    """Where one wanted to go to."""


_STOP = """wanted => {
  const here = document.activeElement;
  if (!here || here === document.body || here === document.documentElement) return null;
  const style = getComputedStyle(here), box = here.getClientRects()[0] || here.getBoundingClientRect();
  const left = Math.max(0, box.left), right = Math.min(innerWidth, box.right);
  const top = Math.max(0, box.top), bottom = Math.min(innerHeight, box.bottom);
  const shown = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
  return {
    place: wanted ? 0 : [...document.querySelectorAll("*")].indexOf(here),
    reached: here === wanted,
    what: here.cloneNode(false).outerHTML,
    seen: right > left && bottom > top && shown !== null && (here.contains(shown) || shown.contains(here)),
    marked: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1,
  };
}"""
_REACHABLE = """() => {
  const shown = one => one.checkVisibility({visibilityProperty: true}) && !one.closest("[inert]");
  const groups = new Set();
  return [...document.querySelectorAll(
    "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex='0']")]
    .filter(one => shown(one) && !one.disabled && one.tabIndex >= 0)
    .filter(one => {
      if (one.type !== "radio") return true;
      const of_group = groups.has(one.name);
      groups.add(one.name);
      return !of_group;
    }).map(one => one.cloneNode(false).outerHTML);
}"""


def stops(page: Page, most: int = 300) -> list[Stop]:
    """Everywhere that the Tab key leads, from the top of the page until it is left."""
    page.evaluate("() => { document.activeElement && document.activeElement.blur(); scrollTo(0, 0); }")
    found: list[Stop] = []
    for _ in range(most):
        page.keyboard.press("Tab")
        stop = stop_of(page)
        if stop is None or (found and stop.place == found[0].place):
            return found
        found.append(stop)
    raise AssertionError(f"after {most} times Tab the page is not left: {found[-3:]}")


def stop_of(page: Page, wanted: Locator | None = None) -> Stop | None:
    """Where the keyboard is now; with `wanted`, which must be there, whether that is it, and `place` is 0."""
    raw = page.evaluate(_STOP) if wanted is None else wanted.evaluate(_STOP)
    return None if raw is None else Stop(**raw)


def reachable(page: Page) -> list[str]:
    """All that one should be able to reach by Tab; of radio buttons one of each name."""
    found: list[str] = page.evaluate(_REACHABLE)
    return found
