"""How requests find their pages, and what is said when something is wrong: a page, within two seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.insight.dying import let_die
from tests.service.calling import Gated, Running, running
from tests.service.console.browsing import Browser
from tests.service.console.conftest import Visit
from tests.service.test_access import make
from tests.waiting import wait_until

from bide import Bide, Every
from bide.core.errors import OutcomeUnknown, StoreCorrupt, StoreFull, StoreUnavailable
from bide.core.names import new_id
from bide.service.access import Verb
from bide.service.console import pages
from bide.service.sessions import COOKIE, cookie_name
from bide.stores.memory import MemoryStore
from bide.testing import FaultyStore

SHIPPED = pages.PATIENCE


@pytest.fixture(scope="module")
def one() -> Iterator[Running]:
    with running("memory:") as found:
        yield found


# --- requests


def test_every_page_is_safe(browser: Browser) -> None:
    browser.api.put("a", "b", delay="0s")
    browser.api.put("c", "d")
    for path in ("/", "/tasks", "/tasks/a/b", "/dead", "/topics", "/topics/a", "/timeline", "/changes", "/none",
                 "/login", "/tasks?state=x", "/tasks/%00/b", "/recurring", "/recurring/a/b"):  # fmt: skip
        page = browser.get(path)
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert page.headers["cache-control"] == "no-store"
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["vary"] == "cookie, accept-language"
        for tag, attributes in page.elements:
            assert not [name for name in attributes if name.startswith(("on", "hx-on")) or name == "style"]
            assert tag != "style"
            assert tag != "script" or attributes.get("src", "").startswith("/static/")  # type: ignore[union-attr]


def test_head_is_get_without_a_body(browser: Browser) -> None:
    for path in ("/tasks", "/tasks/a/b", "/login", "/none", browser.get("/tasks").all("script")[0]["src"] or ""):
        whole, head = browser.get(path), browser("HEAD", path)
        assert (head.status, head.body) == (whole.status, b"")
        assert head.headers.get("content-type") == whole.headers.get("content-type")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/tasks", "GET, HEAD"), ("PUT", "/tasks/a/b", "GET, HEAD"), ("GET", "/logout", "POST"),
        ("DELETE", "/tasks/a/b/payload", "GET, HEAD"), ("PUT", "/login", "GET, HEAD, POST"),
        ("OPTIONS", "/tasks", "GET, HEAD"),
    ],
)  # fmt: skip
def test_wrong_methods(browser: Browser, method: str, path: str, allowed: str) -> None:
    page = browser(method, path)
    assert page.status == 405
    assert page.headers["allow"] == allowed
    assert "This method is not supported here" in page.text


def test_static_files_are_kept_for_ever_and_only_read(browser: Browser) -> None:
    src = browser.get("/tasks").all("script")[0]["src"] or ""
    assert "immutable" in browser.get(src).headers["cache-control"]
    assert browser("POST", src).status == 405
    for path in ("/static/none.js", "/static/../pages.py", "/static/%2e%2e/pages.py", "/static/"):
        assert browser.get(path).status == 404


@pytest.mark.parametrize(
    "path",
    [
        "/none", "/tasks/", "/tasks/a", "/tasks/a/", "/tasks//b", "/tasks/a/b/none", "/tasks/a/b/c/d", "//tasks", "/%",
        "/%C3%A9", "/%ff", "*", "/..//tasks", "/%2e%2e/tasks",
    ],
)  # fmt: skip
def test_unknown_paths(browser: Browser, path: str) -> None:
    page = browser.get(path)
    assert page.status == 404
    assert "There is no such page" in page.text
    machine = browser("GET", "/none", headers={"accept": "application/json"})
    assert machine.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    "path", ["/tasks/%zz/b", "/tasks/a/%", "/tasks/%ff/b", "/tasks/a/%c3", "/tasks?topic=%ff", "/tasks?key=%c3%28"]
)
def test_broken_encoding(browser: Browser, path: str) -> None:
    page = browser.get(path)
    assert page.status == 422
    assert "A value is not accepted" in page.text


def test_too_many_fields(browser: Browser) -> None:
    assert browser.get("/tasks?" + "&".join(f"a{n}=" for n in range(4_900))).status == 200
    assert browser.get("/tasks?" + "&".join(f"a{n}=" for n in range(5_100))).status == 422
    page = browser.get("/tasks")
    many = [("csrf", page.all("body")[0]["hx-headers"] or ""), *((f"a{n}", "") for n in range(5_100))]
    assert browser.post("/changes", many).status == 422


# --- who asks


def test_what_changes_something_must_come_from_our_page(one: Running, browser: Browser, visit: Visit) -> None:
    browser.get("/tasks")
    csrf = browser.get("/tasks").csrf
    for path in ("/changes", f"/changes/{new_id()}/stop", "/topics/t/pause", "/topics/t/resume", "/recurring"):
        for fields in ({}, {"csrf": ""}, {"csrf": csrf[:-1] + ("A" if csrf[-1] != "A" else "B")}, {"csrf": "é"}):
            page = browser.post(path, fields)
            assert page.status == 403
            assert "this form belongs to another session" in page.text
    assert one.run(one.app.paused()) == {}
    for headers in (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
    ):
        page = browser.post("/changes", {"csrf": csrf}, **headers)
        assert page.status == 403
        assert "a page of another" in page.text
    other = visit(one)
    other.get("/tasks")
    assert other.post("/changes", {"csrf": csrf}).status == 403
    assert browser.post("/changes", {"csrf": csrf, "verb": "none"}).status == 422
    assert browser("POST", "/changes", b"\x00\xff", {"content-type": "multipart/form-data"}).status == 422


PAGES = ("/", "/overview/live", "/topics", "/timeline", "/tasks", "/dead?fresh=yes", "/recurring", "/changes")
OF_A_TOPIC = (
    "/topics/{}", "/timeline?topic={}", "/tasks?topic={}", "/tasks/{}/1", "/tasks/{}/1/live", "/tasks/{}/1/payload",
    "/tasks/{}/none", "/dead?topic={}", "/dead?topic={}&error=x", "/dead?topic={}&list=yes", "/recurring?topic={}",
    "/recurring/{}/recurs",
)  # fmt: skip


async def _work(app: Bide, topic: str) -> None:
    """Something of everything."""
    await app.schedule_many([app.new(topic, key=key, delay="1h") for key in ("1", "2")])
    await app.recurring.add(topic, Every("1h"), key="recurs")
    await let_die(app, topic, {"dead": f"broken {topic}"})
    await app.pause(topic)
    await app.history.flush()


def test_everybody_sees_their_own_topics_alone(visit: Visit) -> None:
    with running("memory:") as one:
        for topic in ("shop.order", "bank.payment"):
            one.run(_work(one.app, topic))
        whole, shop, blind = (
            one.run(make(one.app, name, frozenset({verb}), (topics,)))[1]
            for name, verb, topics in (
                ("whole", Verb.READ, "*"), ("shop", Verb.READ, "shop.*"), ("blind", Verb.SCHEDULE, "*"),
            )
        )  # fmt: skip
        browser = visit(one)
        for path in PAGES:
            assert browser.get(path).status == 303, "to the login"
        browser.log_in(blind)
        for path in PAGES:
            page = browser.get(path)
            assert page.status == 403, path
            assert "may not read over all topics" in page.text
            assert b"bank" not in page.body

        browser.log_in(whole)
        counted = {series["name"]: sum(series["counts"]) for series in browser.get("/timeline").chart["series"]}
        assert counted.keys() == {"shop.order", "bank.payment"}
        browser.log_in(shop)
        for path in PAGES:
            page = browser.get(path)
            assert page.status == 200, path
            assert b"bank" not in page.body, path
            assert b"shop.order" in page.body or path == "/changes"
        for path in OF_A_TOPIC:
            page = browser.get(path.format("bank.payment"))
            assert page.status == 403, path
            denied = "\u2068shop\u2069 may not read on topic \u2068bank.payment\u2069: their token does not allow it"
            assert denied in page.text
        browser.language = "zh"
        assert "不能对主题 \u2068bank.payment\u2069 执行 read" in browser.get("/tasks/bank.payment/1").text
        browser.language = "en"
        [series] = browser.get("/timeline").chart["series"]
        assert sum(series["counts"]) == counted["shop.order"]
        page = browser.get("/dead")
        assert "1 dead task " in page.words
        assert "/changes" not in page.actions, "who may read may not redrive"
        assert "Redrive the ticked ones" not in browser.get("/dead?topic=shop.order&list=yes").words


def test_a_name_that_leads_here_is_not_ours(browser: Browser) -> None:
    for host in ("evil.example", "evil.example:8420", "127.0.0.1.evil.example"):
        page = browser("GET", "/tasks", headers={"host": host})
        assert page.status == 403
        assert "not by that name" in page.text
        assert COOKIE not in page.headers.get("set-cookie", "")


def test_a_link_of_another_site_keeps_the_session(one: Running, browser: Browser) -> None:
    """The browser keeps the cookie back on such a link: a new session would end the forms of all open pages."""
    browser.get("/tasks")
    kept = browser.cookies[cookie_name(browser.host)]
    again = browser("GET", "/tasks", headers={"sec-fetch-site": "cross-site", "cookie": ""})
    assert again.status == 200
    assert again.all("meta", content="0")
    assert "set-cookie" not in again.headers
    assert browser.get("/tasks").status == 200
    assert browser.cookies[cookie_name(browser.host)] == kept


# --- a store that is slow, or away


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (StoreUnavailable("secret address"), 503, "The store is unavailable"),
        (StoreFull("secret"), 503, "The store is full"),
        (StoreCorrupt("secret"), 503, "The store is damaged"),
        (OutcomeUnknown("secret"), 503, "The store's answer was lost"),
        (RuntimeError("secret"), 500, "A defect in the console"),
    ],
)  # fmt: skip
def test_errors_of_the_store_are_pages(visit: Visit, error: Exception, status: int, text: str) -> None:
    store = FaultyStore(MemoryStore())
    with running(store) as one:
        browser = visit(one)
        assert browser.get("/tasks/a/b").status == 404
        store.fault = lambda point: error if point in ("find:before", "get:before") else None
        for path in ("/tasks?topic=none", "/tasks/a/b"):
            page = browser.get(path)
            assert page.status == status
            assert text in page.text
            assert "secret" not in page.text
            assert page.links["Try again"] == path
        store.fault = lambda point: None
        assert browser.get("/tasks/a/b").status == 404


def test_a_silent_store_is_told_in_time(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SHIPPED <= 2
    store = Gated()
    with running(store) as one:
        browser = visit(one)
        with monkeypatch.context() as patch:
            patch.setattr(pages, "PATIENCE", 0.2)
            store.held |= {"find", "get", "tally"}
            assert browser.get("/tasks").status == 503, "also for whoever comes first: before any token was read"
            store.held.clear()
            wait_until(lambda: browser.get("/tasks").status == 200, "the page, by itself")
            store.held.add("get")
            page = browser.get("/tasks/a/b")
            part = browser("GET", "/tasks/a/b/live", headers={"hx-request": "true"})
        assert page.status == 503
        assert "The store does not answer" in page.text
        assert "it is slow or unavailable" in page.text
        assert page.links["Try again"] == "/tasks/a/b"
        assert part.status == 200
        assert "The store does not answer" in part.text
        assert not part.all("html")
        store.held.clear()
        wait_until(lambda: browser.get("/tasks").status == 200, "the page, by itself")


def test_who_is_refused_stands_in_the_log(caplog: pytest.LogCaptureFixture, visit: Visit) -> None:
    with running("memory:") as one:
        one.run(make(one.app, "ann"))
        _, header = one.run(make(one.app, "bo", topics=("order.*",)))
        browser = visit(one)
        browser.log_in(header)
        with caplog.at_level("WARNING", logger="bide.audit"):
            browser.get("/tasks/mail.send/1")
    assert [one for one in caplog.records if one.name == "bide.audit" and "mail.send" in one.getMessage()]
