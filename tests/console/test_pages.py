"""Every page on every store, with nothing in it and with ten tasks."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from tests.console.axe import violations
from tests.console.browser import overflow
from tests.console.conftest import Visits
from tests.console.seen import LANGUAGES, OF_TEN, PAGES, titled
from tests.console.serving import Served, fill_ten


class TestEmpty:
    """A store with nothing in it, which everybody sees first."""

    @pytest.mark.parametrize("language", LANGUAGES)
    def test_each_page_says_so_and_is_in_order(self, visits: Visits, axe: str, language: str) -> None:
        with visits(locale=language) as visitor:
            for path in PAGES.values():
                page = visitor.goto(path)
                titled(page)
                assert not overflow(page), path
                if language == "en-GB":
                    assert not (wrong := violations(page, axe)), "\n".join([path, *wrong])
                assert page.locator("html").get_attribute("lang") == ("zh-CN" if language == "zh-CN" else "en")

    def test_what_is_not_there_has_a_page_too(self, visits: Visits, axe: str) -> None:
        with visits() as visitor, visitor.watch.expecting(404):
            for path in ("/nowhere", "/tasks/order.close/4711"):
                page = visitor.goto(path)
                titled(page)
                assert not violations(page, axe), path
                expect(page.get_by_role("link", name="Overview").last).to_be_visible()


def test_each_page_shows_what_there_is(visits: Visits, served: Served) -> None:
    """Ten tasks, in every state."""
    with served.api() as api:
        fill_ten(api)
    with visits() as visitor:
        for path in (PAGES | OF_TEN).values():
            titled(visitor.goto(path))
        page = visitor.goto("/tasks")
        expect(page.get_by_role("region", name="Tasks that were found").get_by_role("row")).to_have_count(11)
        page = visitor.goto("/dead")
        expect(page.get_by_role("region", name="Groups").get_by_role("row").nth(1)).to_contain_text("503")
        page = visitor.goto("/topics")
        expect(page.get_by_role("region", name="Topics").get_by_role("row")).to_have_count(5)
        page = visitor.goto("/")
        expect(page.get_by_role("link", name="Pending")).to_contain_text("7")
        expect(page.get_by_role("link", name="Dead", exact=False).last).to_contain_text("2")
