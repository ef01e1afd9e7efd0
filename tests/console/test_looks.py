"""Every page as it looks to everybody: wide and narrow, light and dark, in both languages, by eye and by keyboard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import cache
from typing import TypeAlias

import pytest
from playwright.sync_api import Browser, expect
from tests.console.axe import violations
from tests.console.browser import NARROW, WIDE, Scheme, Visitor, overflow, reachable, stops, visitor
from tests.console.conftest import Visits
from tests.console.seen import OF_TEN, PAGES, fill_recurring, fill_ten, titled
from tests.service.calling import Api, Running, running

from bide import StoreUnavailable
from bide.stores.memory import MemoryStore
from bide.testing.faults import FaultyStore

Look: TypeAlias = tuple[str, tuple[int, int], Scheme]
LOOKS: list[Look] = [
    ("en-GB", WIDE, "light"), ("zh-CN", NARROW, "light"), ("zh-CN", WIDE, "dark"), ("en-GB", NARROW, "dark"),
]  # fmt: skip
"""Every two of language, size and scheme come together somewhere. Pages have them in turn."""


def in_turn(names: list[str]) -> list[tuple[str, Look]]:
    return [(name, LOOKS[place % len(LOOKS)]) for place, name in enumerate(names)]


@pytest.fixture(scope="module")
def empty() -> Iterator[Running]:
    """One with nothing in it, which everybody sees first."""
    with running("memory:") as found:
        yield found


Views: TypeAlias = Callable[[Running, Look], AbstractContextManager[Visitor]]


@pytest.fixture(scope="module")
def views(browser: Browser) -> Iterator[Views]:
    """One visitor for each look opens one page after another there: for a visitor of its own, each would start two
    processes."""
    with ExitStack() as opened:

        @cache
        def kept(origin: str, locale: str, scheme: Scheme) -> Visitor:
            return opened.enter_context(visitor(browser, origin, locale=locale, scheme=scheme, still=True))

        @contextmanager
        def view(where: Running, look: Look) -> Iterator[Visitor]:
            locale, (width, height), scheme = look
            found = kept(where.url, locale, scheme)
            found.page.set_viewport_size({"width": width, "height": height})
            yield found
            found.watch.check()

        yield view


@pytest.fixture(scope="module", autouse=True)
def filled(one: Running) -> None:
    with closing(Api(one.url)) as api:
        fill_ten(api)
        fill_recurring(api)


@pytest.mark.parametrize(("name", "look"), in_turn([*PAGES, *OF_TEN]))
def test_each_page_is_in_order_for_the_eye_and_the_keyboard(
    views: Views, one: Running, axe: str, name: str, look: Look
) -> None:
    language, size, scheme = look
    with views(one, (language, WIDE, scheme)) as visitor:
        page = visitor.goto((PAGES | OF_TEN)[name])
        titled(page)
        for width, height in (NARROW, WIDE, size):
            page.set_viewport_size({"width": width, "height": height})
            assert not (wide := overflow(page)), f"{width} px: {wide}"
        assert not (wrong := violations(page, axe)), "\n".join(wrong)

        found = stops(page)
        assert found[0].what.startswith('<a class="skip"')
        assert not [stop for stop in found if not stop.marked], "one sees where one is"
        assert not [stop for stop in found if not stop.seen]
        places = [stop.place for stop in found]
        assert places == sorted(places), "in the order in which it is read"
        missing = set(reachable(page)) - {stop.what for stop in found}
        assert not missing, missing


@pytest.mark.parametrize(("name", "look"), in_turn(list(PAGES)))
def test_each_page_with_nothing_on_it(views: Views, empty: Running, axe: str, name: str, look: Look) -> None:
    with views(empty, look) as visitor:
        page = visitor.goto(PAGES[name])
        titled(page)
        assert page.locator("html").get_attribute("lang") == ("zh-CN" if look[0] == "zh-CN" else "en")
        assert not (wide := overflow(page)), wide
        assert not (wrong := violations(page, axe)), "\n".join(wrong)


def test_long_names_fit_in(visits: Visits) -> None:
    name = "x" * 170
    with running("memory:") as one, visits(one, size=NARROW, locale="zh-CN", still=True) as visitor:
        with closing(Api(one.url)) as api:
            api.dead(name, name)
            api.done("PUT", f"/v1/topics/{name}/recurring/{name[1:]}", {"rule": "@daily"})
        paths = [f"/tasks/{name}/{name}", f"/topics/{name}", f"/recurring/{name}/{name[1:]}", f"/dead?topic={name}"]
        for path in [*paths, f"/tasks?topic={name}&key=none", "/", "/timeline", "/topics"]:
            assert not (wide := overflow(visitor.goto(path))), f"{path}: {wide}"


def test_each_page_can_be_read_without_scripts(visits: Visits) -> None:
    with visits(scripts=False) as visitor:
        for path in (PAGES | OF_TEN).values():
            page = visitor.goto(path)
            titled(page)
            expect(page.get_by_role("navigation", name="Pages", exact=True)).to_be_visible()


def test_what_is_not_there_has_a_page_too(visits: Visits, axe: str) -> None:
    with visits(size=NARROW) as visitor, visitor.watch.expecting(404):
        for path in ("/nowhere", "/tasks/order.close/4711"):
            page = visitor.goto(path)
            titled(page)
            assert not violations(page, axe), path
            expect(page.get_by_role("link", name="Overview").last).to_be_visible()


def test_a_store_that_is_away_has_a_page_and_is_back_by_one_click(visits: Visits, axe: str) -> None:
    store = FaultyStore(MemoryStore())
    with running(store) as one, visits(one, size=NARROW) as visitor:
        visitor.goto("/")
        store.fault = lambda point: StoreUnavailable("away") if point == "tally:before" else None
        with visitor.watch.expecting(503):
            page = visitor.goto("/topics")
            expect(page.get_by_role("alert")).to_contain_text("The store")
            assert not overflow(page)
            assert not violations(page, axe)
            store.fault = lambda _: None
            page.get_by_role("link", name="Try again").click()
        expect(page.get_by_role("heading", name="Topics", level=1)).to_be_visible()


def test_the_first_view_is_small(visits: Visits) -> None:
    """All that a browser with nothing in its cache loads: at most 200 kB, with headers."""
    with visits(first=True, still=True) as visitor:
        received: list[float] = []
        session = visitor.page.context.new_cdp_session(visitor.page)
        session.send("Network.enable")
        session.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
        visitor.page.goto(visitor.origin, wait_until="commit")
        expect(visitor.page.locator("html")).to_have_attribute("data-zone", "Europe/Berlin")
        visitor.page.wait_for_load_state("networkidle")
        assert len(received) >= 4, "the page, its style and its scripts"
        assert sum(received) <= 200_000


def test_times_are_of_the_browsers_zone(visits: Visits, api: Api) -> None:
    api.put("zoned", "z", at="2030-06-30T22:30:00Z")
    with visits(zone="Asia/Shanghai", first=True) as visitor:
        page = visitor.page
        page.goto(f"{visitor.origin}/tasks/zoned/z", wait_until="commit")
        expect(page.get_by_role("main")).to_contain_text("2030-07-01 06:30:00")
        expect(page.get_by_role("main")).to_contain_text("2030-06-30T22:30:00.000Z")
