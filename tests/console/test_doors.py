"""Coming in, what one may see, and leaving; by mouse and by keyboard. And what is shown when the store is away."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from playwright.sync_api import Browser, expect
from tests.console.axe import violations
from tests.console.browser import Visitor, overflow, visitor
from tests.console.hands import HANDS
from tests.console.serving import Served, serving
from tests.servers.fixtures import StartsRedis

ANSWERED_AFTER = "performance.getEntriesByType('navigation')[0].responseEnd"
"""Milliseconds from when the page was asked for, without the time that this machine takes to show it."""


class Guarded(NamedTuple):
    """An instance that lets nobody in without a token."""

    served: Served
    everything: str
    """The token of somebody who may do all."""
    orders: str
    """Of somebody who may read topics that begin with "order." and do nothing."""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    store = f"sqlite:///{tmp_path_factory.mktemp('store')}/tasks.db"

    def token(name: str, *words: str) -> str:
        command = [sys.executable, "-m", "bide", "token", "add", name, "--store", store, *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    everything = token("anna", "--verb", "all")
    orders = token("bo", "--verb", "read", "--topic", "order.*")
    with serving(store, tmp_path_factory.mktemp("serve")) as served:
        with served.api(everything) as api:
            api.put("order.close", "4711")
            api.put("post.publish", "p1")
        yield Guarded(served, everything, orders)


def log_in(at: Visitor, hand: str, token: str) -> None:
    using = HANDS[hand](at.page)
    using.write(at.page.get_by_label("Token"), token)
    using.press(at.page.get_by_role("button", name="Log in"))


@pytest.mark.parametrize("hand", HANDS)
def test_one_logs_in_goes_on_where_one_wanted_to_and_leaves(
    browser: Browser, guarded: Guarded, axe: str, hand: str
) -> None:
    with visitor(browser, guarded.served.url) as at:
        page = at.goto("/tasks?topic=order.close")
        assert at.path == "/login"
        assert not violations(page, axe)
        with at.watch.expecting(401):
            log_in(at, hand, "not a token")
            expect(page.get_by_role("alert")).to_be_visible()
            assert not violations(page, axe)
        log_in(at, hand, guarded.everything)
        expect(page.get_by_role("link", name="4711")).to_be_visible()
        assert at.path == "/tasks"
        expect(page.get_by_role("banner")).to_contain_text("anna")
        HANDS[hand](page).press(page.get_by_role("button", name="Log out"))
        expect(page.get_by_label("Token")).to_be_visible()
        at.goto("/")
        assert at.path == "/login"


def test_one_sees_what_one_may_and_no_buttons_for_the_rest(browser: Browser, guarded: Guarded) -> None:
    with visitor(browser, guarded.served.url) as at:
        at.goto("/tasks")
        log_in(at, "mouse", guarded.orders)
        page = at.page
        expect(page.get_by_role("link", name="4711")).to_be_visible()
        expect(page.get_by_role("main")).not_to_contain_text("p1")
        page = at.goto("/topics")
        expect(page.get_by_role("main")).to_contain_text("order.close")
        expect(page.get_by_role("main")).not_to_contain_text("post.publish")
        page = at.goto("/tasks/order.close/4711")
        expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
        with at.watch.expecting(403, 404):
            page = at.goto("/tasks/post.publish/p1")
            expect(page.get_by_role("main")).not_to_contain_text("waiting")


def test_a_token_that_is_revoked_ends_the_open_page(browser: Browser, guarded: Guarded) -> None:
    """The part that keeps itself fresh leads to the login, once the service knows."""
    store = guarded.served.store
    bide = [sys.executable, "-m", "bide", "token"]
    command = [*bide, "add", "eva", "--verb", "read", "--store", store, "--json"]
    made = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    id, token = (made.partition(f'"{name}":')[2].split('"')[1] for name in ("id", "token"))
    with visitor(browser, guarded.served.url) as at:
        at.goto("/")
        log_in(at, "mouse", token)
        expect(at.page.get_by_role("heading", name="Overview")).to_be_visible()
        with at.watch.expecting(401):
            subprocess.run([*bide, "revoke", id, "--store", store], check=True, capture_output=True)
            expect(at.page.get_by_label("Token")).to_be_visible(timeout=20_000)


@pytest.mark.faults
def test_a_store_that_does_not_answer_has_a_page_within_two_seconds_and_is_back_by_itself(
    browser: Browser, redis_server: StartsRedis, axe: str, tmp_path: Path
) -> None:
    server = redis_server()
    with serving(server.url, tmp_path, patient=False) as served, visitor(browser, served.url) as at:
        at.goto("/")
        server.pause()
        with at.watch.expecting(503):
            for path in ("/tasks", "/topics"):
                page = at.goto(path)
                assert page.evaluate(ANSWERED_AFTER) < 2_500, "milliseconds"
                expect(page.get_by_role("alert")).to_contain_text("The store")
                assert not overflow(page)
                assert not violations(page, axe)
        server.resume()
        page = at.page
        page.get_by_role("link", name="Try again").click()
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.get_by_role("heading", name="Topics", level=1)).to_be_visible()
