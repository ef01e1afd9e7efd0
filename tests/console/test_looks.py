"""Every page as it looks to everybody: wide and narrow, light and dark, in both languages, by eye and by keyboard."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from tests.console.axe import violations
from tests.console.browser import NARROW, WIDE, Scheme, Visitor, overflow, reachable, stops
from tests.console.conftest import Visits
from tests.console.seen import OF_TEN, PAGES, titled
from tests.console.serving import ODD, Served, fill_group, fill_ten

pytestmark = pytest.mark.parametrize("store", ["sqlite"], indirect=True, scope="module")

LOOKS: dict[str, list[tuple[tuple[int, int], Scheme]]] = {
    "en-GB": [(WIDE, "light"), (NARROW, "dark")],
    "zh-CN": [(WIDE, "dark"), (NARROW, "light")],
}
"""By language: every two of size, scheme and language come together somewhere."""


@pytest.fixture(scope="module", autouse=True)
def filled(served: Served) -> None:
    with served.api() as api:
        fill_ten(api)
        fill_group(api, 3)


def check_looks(visitor: Visitor, axe: str, path: str, looks: list[tuple[tuple[int, int], Scheme]]) -> None:
    """One page, in one look after the other."""
    page = visitor.goto(path)
    for size, scheme in looks:
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.emulate_media(color_scheme=scheme)
        where = f"{path}, {size[0]} px, {scheme}"
        assert not (wide := overflow(page)), f"{where}: {wide}"
        assert not (wrong := violations(page, axe)), "\n".join([where, *wrong])


@pytest.mark.parametrize("language", LOOKS)
@pytest.mark.parametrize("name", [*PAGES, *OF_TEN])
def test_each_page_in_every_look(visits: Visits, axe: str, name: str, language: str) -> None:
    with visits(locale=language) as visitor:
        check_looks(visitor, axe, (PAGES | OF_TEN)[name], LOOKS[language])
        titled(visitor.page)


@pytest.mark.parametrize("name", [*PAGES, *OF_TEN])
def test_the_keyboard_leads_everywhere_in_order(visits: Visits, name: str) -> None:
    with visits() as visitor:
        page = visitor.goto((PAGES | OF_TEN)[name])
        found = stops(page)
        assert found[0].what.startswith('<a class="skip"')
        assert not [stop for stop in found if not stop.marked], "one sees where one is"
        assert not [stop for stop in found if not stop.seen]
        places = [stop.place for stop in found]
        assert places == sorted(places), "in the order in which it is read"
        missing = set(reachable(page)) - {stop.what for stop in found}
        assert not missing, missing


def test_each_page_can_be_read_without_scripts(visits: Visits) -> None:
    with visits(scripts=False) as visitor:
        for path in (PAGES | OF_TEN).values():
            page = visitor.goto(path)
            titled(page)
            expect(page.get_by_role("navigation", name="Pages", exact=True)).to_be_visible()


def test_names_and_payloads_are_shown_and_do_nothing(visits: Visits) -> None:
    with visits() as visitor:
        page = visitor.goto(OF_TEN["a task with an odd name"])
        expect(page.get_by_role("main")).to_contain_text(ODD)
        expect(page.get_by_role("main")).to_contain_text("<script>alert(1)</script>")
        page = visitor.goto("/tasks?topic=post.publish")
        page.get_by_role("link", name=ODD).click()
        assert visitor.path == OF_TEN["a task with an odd name"]


def test_the_first_view_is_small(visits: Visits) -> None:
    """All that a browser with nothing in its cache loads: at most 200 kB, with headers."""
    with visits(first=True) as visitor:
        received: list[float] = []
        session = visitor.page.context.new_cdp_session(visitor.page)
        session.send("Network.enable")
        session.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
        visitor.page.goto(visitor.origin, wait_until="commit")
        expect(visitor.page.locator("html")).to_have_attribute("data-zone", "Europe/Berlin")
        visitor.page.wait_for_load_state("networkidle")
        assert len(received) >= 4, "the page, its style and its scripts"
        assert sum(received) <= 200_000


def test_the_language_is_the_browsers_until_one_is_chosen(visits: Visits) -> None:
    with visits(locale="zh-CN") as visitor:
        page = visitor.goto("/tasks")
        expect(page.locator("html")).to_have_attribute("lang", "zh-CN")
        page.get_by_role("link", name="English").click()
        expect(page.locator("html")).to_have_attribute("lang", "en")
        assert visitor.path == "/tasks"
        visitor.goto("/topics")
        expect(page.get_by_role("link", name="中文")).to_be_visible()


def test_times_are_of_the_browsers_zone(visits: Visits, served: Served) -> None:
    with served.api() as api:
        api.put("zoned", "z", at="2030-06-30T22:30:00Z")
    with visits(zone="Asia/Shanghai", first=True) as visitor:
        page = visitor.page
        page.goto(f"{visitor.origin}/tasks/zoned/z", wait_until="commit")
        expect(page.get_by_role("main")).to_contain_text("2030-07-01 06:30:00")
        expect(page.get_by_role("main")).to_contain_text("2030-06-30T22:30:00.000Z")
