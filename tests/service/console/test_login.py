"""Logging in and out, the language, and where one is led: nobody else's page decides that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.service.calling import Running, running
from tests.service.console.browsing import Browser, Page
from tests.service.console.conftest import Visit
from tests.service.test_access import make

from bide.core.instants import Millis
from bide.service.sessions import COOKIE, cookie_name
from bide.testing import ManualClock

START: Millis = 1_900_000_020_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def one(clock: ManualClock) -> Iterator[Running]:
    """One for which there is a token."""
    with running("memory:", clock=clock) as found:
        yield found


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[Running, str]]:
    """One that all tests share which begin no session that lasts, and a token of it."""
    with running("memory:") as found:
        yield found, found.run(make(found.app, "ann"))[1].removeprefix("Bearer ")


@pytest.fixture
def stranger(guarded: tuple[Running, str], visit: Visit) -> Browser:
    """Somebody at its door."""
    return visit(guarded[0])


@pytest.fixture
def token(one: Running) -> str:
    return one.run(make(one.app, "ann"))[1].removeprefix("Bearer ")


def led_to(page: Page) -> str:
    assert page.status == 303, page
    return page.headers["location"]


def test_in_and_out(browser: Browser, token: str) -> None:
    assert led_to(browser.get("/tasks?state=dead")) == "/login?next=%2Ftasks%3Fstate%3Ddead"
    login = browser.get("/login?next=%2Ftasks%3Fstate%3Ddead")
    assert login.status == 200
    assert login.field("next") == "/tasks?state=dead"
    assert not login.all("nav")
    answer = browser.post("/login", {"token": f" {token}\n", "next": login.field("next")})
    assert led_to(answer) == "/tasks?state=dead"
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert "SameSite=Strict" in answer.headers["set-cookie"]
    page = browser.get("/tasks?state=dead")
    assert page.status == 200
    assert "ann" in page.text
    name = cookie_name(browser.host)
    copied = browser.cookies[name]
    assert led_to(browser.post("/logout", {})) == "/login"
    assert name not in browser.cookies
    assert browser.get("/tasks").status == 303
    browser.cookies[name] = copied
    assert browser.get("/tasks").status == 303, "the session has ended, also for whoever has copied its cookie"


@pytest.mark.parametrize("given", ["", "nonsense", "bide_00000000_" + "A" * 43, "é" * 50, "x" * 10_000, "\x00"])
def test_a_wrong_token_is_told_and_not_repeated(stranger: Browser, given: str) -> None:
    page = stranger.post("/login", {"token": given, "next": "/tasks"})
    assert page.status == 401
    assert page.field("next") == ("/tasks" if len(given) < 16_000 else "/")
    assert len(page.all("p", role="alert")) == 1
    assert cookie_name(stranger.host) not in stranger.cookies
    if len(given) > 10:
        assert given.encode() not in page.body


@pytest.mark.parametrize(
    "where",
    [
        "https://evil.example", "//evil.example", "/\\evil.example", "\\\\evil.example", "javascript:alert(1)", "",
        "/\t/evil.example", "/\r\nset-cookie: a=b", "evil.example", "///evil.example", "/é", " //evil.example",
    ],
)  # fmt: skip
def test_nobody_is_led_elsewhere(guarded: tuple[Running, str], stranger: Browser, where: str) -> None:
    for answer in (
        stranger.post("/login", {"token": guarded[1], "next": where}),
        stranger.get("/language", to="zh", next=where),
    ):
        assert led_to(answer) == "/"
    assert stranger.get("/login", next=where).field("next") == "/"


def test_another_sites_page_logs_nobody_in_or_out(browser: Browser, token: str) -> None:
    for headers in (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
    ):
        for path, fields in (("/login", {"token": token}), ("/logout", {})):
            page = browser.post(path, fields, **headers)
            assert page.status == 403
            assert "set-cookie" not in page.headers
            assert "You may not do this" in page.text


def test_a_session_that_ends_while_a_page_is_open(
    one: Running, browser: Browser, token: str, clock: ManualClock
) -> None:
    assert browser.log_in(token).status == 200
    clock.advance(13 * 3_600_000)
    part = {"hx-request": "true", "hx-current-url": f"http://{browser.host}/tasks?state=dead"}
    answer = browser("GET", "/tasks/a/b/live", headers=part)
    assert (answer.status, answer.headers["hx-redirect"]) == (401, "/login?next=%2Ftasks%3Fstate%3Ddead")
    for elsewhere in ("http://x//evil.example", "http://[::1"):
        part["hx-current-url"] = elsewhere
        assert browser("GET", "/tasks/a/b/live", headers=part).headers["hx-redirect"] == "/login?next=%2F"
    form = browser.post("/changes", {"verb": "cancel"}, referer=f"http://{browser.host}/tasks?state=due")
    assert led_to(form) == "/login?next=%2Ftasks%3Fstate%3Ddue"
    assert led_to(browser.get("/tasks")) == "/login?next=%2Ftasks"


@pytest.mark.parametrize(
    "junk",
    ["", ";;;", "=", "a", "é=ü", COOKIE, f"{COOKIE}=", f"{COOKIE}=x; {COOKIE}=y", "bide_language=xx",
     "bide_zone=../../etc/passwd", "x" * 9_000, f"{COOKIE}=1.aaaaaaaa.1.{'A' * 22}.{'A' * 43}"],
)  # fmt: skip
def test_cookies_that_are_junk(stranger: Browser, junk: str) -> None:
    junk = junk.replace(COOKIE, cookie_name(stranger.host))
    answer = stranger("GET", "/tasks", headers={"cookie": junk})
    assert led_to(answer) == "/login?next=%2Ftasks"
    page = stranger("GET", "/login", headers={"cookie": junk})
    assert page.status == 200
    assert page.all("html")[0]["lang"] == "en"


def test_the_language_is_chosen_and_kept(browser: Browser) -> None:
    assert browser.get("/tasks?").links["中文"] == "/language?to=zh&next=%2Ftasks"
    page = browser.get("/tasks?state=dead")
    answer = browser.get(page.links["中文"])
    assert led_to(answer) == "/tasks?state=dead"
    page = browser.get(led_to(answer))
    assert page.all("html")[0]["lang"] == "zh-CN"
    assert "没有找到任务" in page.text
    browser.get(page.links["English"])
    assert "No task was found" in browser.get("/tasks?state=dead").text
    assert browser.get("/language?to=xx").status == 422
    assert browser.get("/language").status == 422


def test_over_plain_http_a_login_that_the_browser_would_forget_is_refused(
    guarded: tuple[Running, str], stranger: Browser
) -> None:
    form = {"token": guarded[1], "next": "/tasks"}
    page = stranger.post("/login", form, host="bide.lan", origin="http://bide.lan")
    assert (page.status, "plain HTTP" in page.text, cookie_name(stranger.host) in stranger.cookies) == (
        403,
        True,
        False,
    )
    assert led_to(stranger.post("/login", form, host="bide.lan", origin="https://bide.lan")) == "/tasks"


def test_without_a_token_there_is_nothing_to_log_in_to(browser: Browser) -> None:
    assert led_to(browser.get("/login?next=%2Ftasks")) == "/tasks"
    assert browser.get("/tasks").status == 200
