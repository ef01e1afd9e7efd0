"""How requests find their pages, and what is said when something is wrong: a page, within two seconds."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.fixtures import StartsRedis
from tests.service.calling import Running, running
from tests.service.console.browsing import Browser
from tests.service.console.conftest import Visit
from tests.service.test_access import make
from tests.waiting import wait_until

from bide.core.errors import OutcomeUnknown, StoreCorrupt, StoreFull, StoreUnavailable
from bide.service.access import COOKIE
from bide.service.console import pages
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
    for fields in ({}, {"csrf": ""}, {"csrf": csrf[:-1] + ("A" if csrf[-1] != "A" else "B")}, {"csrf": "é"}):
        page = browser.post("/changes", fields)
        assert page.status == 403
        assert "this form belongs to another session" in page.text
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


def test_a_name_that_leads_here_is_not_ours(browser: Browser) -> None:
    for host in ("evil.example", "evil.example:8420", "127.0.0.1.evil.example"):
        page = browser("GET", "/tasks", headers={"host": host})
        assert page.status == 403
        assert "not by that name" in page.text
        assert COOKIE not in page.headers.get("set-cookie", "")


def test_a_link_of_another_site_keeps_the_session(one: Running, browser: Browser) -> None:
    """The browser keeps the cookie back on such a link: a new session would end the forms of all open pages."""
    browser.get("/tasks")
    kept = browser.cookies[COOKIE]
    again = browser("GET", "/tasks", headers={"sec-fetch-site": "cross-site", "cookie": ""})
    assert again.status == 200
    assert again.all("meta", content="0")
    assert "set-cookie" not in again.headers
    assert browser.get("/tasks").status == 200
    assert browser.cookies[COOKIE] == kept


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
    store = FaultyStore(MemoryStore())
    with running(store) as one:
        browser = visit(one)
        assert browser.get("/tasks").status == 200
        with monkeypatch.context() as patch:
            patch.setattr(pages, "PATIENCE", 0.2)
            store.latency = lambda name: 3_600.0 if name == "get" else 0.0
            page = browser.get("/tasks/a/b")
            part = browser("GET", "/tasks/a/b/live", headers={"hx-request": "true"})
        assert page.status == 503
        assert "The store does not answer" in page.text
        assert "it is slow or unavailable" in page.text
        assert page.links["Try again"] == "/tasks/a/b"
        assert part.status == 200
        assert "The store does not answer" in part.text
        assert not part.all("html")
        store.latency = None
        wait_until(lambda: browser.get("/tasks").status == 200, "the page, by itself")


def test_a_redis_that_stands_still(redis_server: StartsRedis, visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for whoever comes first: before any token was read."""
    server = redis_server()
    with running(f"{server.url}?shards=2") as one:
        browser = visit(one)
        server.pause()
        with monkeypatch.context() as patch:
            patch.setattr(pages, "PATIENCE", 0.2)
            for path in ("/tasks/order.close/42", "/tasks?state=dead"):
                page = browser.get(path)
                assert page.status == 503
                assert "The store" in page.text
        server.resume()
        wait_until(lambda: browser.get("/tasks").status == 200, "the page, by itself")
        server.pause()
        with monkeypatch.context() as patch:
            patch.setattr(pages, "PATIENCE", 0.2)
            assert browser.get("/tasks?state=dead").status == 503
        server.resume()
        wait_until(lambda: browser.get("/tasks?state=dead").status == 200, "the page, by itself")


def test_a_sqlite_file_that_somebody_has_locked(tmp_path: Path, visit: Visit) -> None:
    with running(f"sqlite:///{tmp_path}/tasks.db") as one:
        browser = visit(one)
        other = sqlite3.connect(tmp_path / "tasks.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert browser.get("/tasks").status == 200, "looking waits for no writer"
        other.execute("ROLLBACK")
        other.close()


def test_who_is_refused_stands_in_the_log(caplog: pytest.LogCaptureFixture, visit: Visit) -> None:
    with running("memory:") as one:
        one.run(make(one.app, "ann"))
        _, header = one.run(make(one.app, "bo", topics=("order.*",)))
        browser = visit(one)
        browser.log_in(header)
        with caplog.at_level("WARNING", logger="bide.audit"):
            browser.get("/tasks/mail.send/1")
    assert [one for one in caplog.records if one.name == "bide.audit" and "mail.send" in one.getMessage()]
