"""The list of tasks: what is found, page by page, what is said where nothing is, and who sees what."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from tests.service.calling import Api, Running, fresh_store, running
from tests.service.console.browsing import Browser, Page
from tests.service.console.conftest import Visit
from tests.service.test_access import make
from tests.waiting import wait_until

from bide import Bide
from bide.core.instants import as_datetime
from bide.service.access import Verb
from bide.testing import ManualClock

MINUTE = 60_000
NAMES = {"topic": "Topic", "key": "Key", "group": "Group", "state": "State", "wake_from": "Due from",
         "wake_before": "and before", "limit": "Per page"}  # fmt: skip


@pytest.fixture(scope="module", params=["memory", "sqlite", "redis"])
def one(request: pytest.FixtureRequest) -> Iterator[Running]:
    """An instance on each store, with some tasks of every kind."""
    with fresh_store(request) as url, running(url, keep_done="1h", keep_cancelled="1h") as found:
        api = Api(found.url)
        for number in range(120):
            group = {"group": f"user-{number % 2}"} if number < 60 else {}
            api.put("order.close", f"order-{number:03d}", delay=f"{number + 10}h", **group)
        api.put("order.remind", "order-007", delay="200h")
        api.dead("mail.send", "broken")
        api.put("mail.send", "late", delay="0s")
        api.put("mail.send", "gone")
        api.done("DELETE", "/v1/topics/mail.send/tasks/gone")
        api.close()
        yield found


@pytest.fixture
def empty() -> Iterator[Running]:
    with running("memory:") as found:
        yield found


def pages_from(browser: Browser, **query: object) -> Iterator[Page]:
    """The first page, and those that follow."""
    page = browser.get("/tasks", **query)
    yield page
    while "Next page" in page.links:
        page = browser.get(page.links["Next page"])
        yield page


def keys(page: Page) -> list[str]:
    """Of the tasks that are shown."""
    assert page.status == 200, page
    return [row[1] if len(row) == 9 else row[0] for row in page.rows[1:] if len(row) > 7]


def test_pages_neither_skip_nor_repeat(browser: Browser) -> None:
    first, *others = pages_from(browser, topic="order.close", state="waiting")
    assert [key for page in (first, *others) for key in keys(page)] == [f"order-{number:03d}" for number in range(120)]
    for page in (first, others[-1]):
        assert "120 tasks" in page.text
    assert browser.get(others[-1].links["First page"]).links.keys() >= {"Next page", "order-000"}
    assert len(keys(browser.get("/tasks", topic="order.close", limit=200))) == 120
    by_group = pages_from(browser, group="user-0", state="waiting", limit=1)
    assert [key for page in by_group for key in keys(page)] == [f"order-{number:03d}" for number in range(0, 60, 2)]


def test_everything(browser: Browser) -> None:
    seen = [(row[2], row[1]) for page in pages_from(browser, limit=50) for row in page.rows[1:] if row[2] != "life"]
    assert len(seen) == len(set(seen)) == 124


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"key": "order-007"}, ["order-007", "order-007"]),
        ({"key": "order-007", "topic": "order.remind"}, ["order-007"]),
        ({"key": "order-007", "group": "user-1"}, ["order-007"]),
        ({"key": "order-007", "state": "dead"}, []),
        ({"key": "gone"}, ["gone"]),
        ({"state": "dead"}, ["broken"]),
        ({"state": "cancelled"}, ["gone"]),
        ({"state": "due"}, ["late"]),
        ({"state": "due", "topic": "order.close"}, []),
        ({"state": "leased"}, []),
        ({"group": "user-1", "wake_before": "13h30m"}, ["order-001", "order-003"]),
        ({"group": "user-1", "wake_from": "64h30m", "wake_before": "67h30m"}, ["order-055", "order-057"]),
        ({"group": "user-1", "state": "dead"}, []),
        ({"group": "nobody"}, []),
        ({"topic": "order.close", "wake_from": "9h", "wake_before": "12h30m"}, ["order-000", "order-001", "order-002"]),
        ({"wake_before": "11h30m"}, ["late", "order-000", "order-001"]),
        ({"topic": "none"}, []),
        ({"topic": " order.close"}, []),
        ({"state": "dead", "wake_before": "1h"}, []),
    ],
)
def test_what_is_searched_for_is_found(browser: Browser, query: dict[str, str], found: list[str]) -> None:
    page = browser.get("/tasks", **query)
    assert keys(page) == found
    for name, text in query.items():
        if name != "state":
            assert page.field(name) == text
    if found:
        assert f"{len(found)} task" in page.text
    else:
        assert "No task was found" in page.text
    assert all("Next page" not in link for link in page.links)


def test_a_task_in_the_list(browser: Browser) -> None:
    page = browser.get("/tasks", topic="mail.send", state="dead")
    [_, row] = page.rows
    assert row[1:5] == ["broken", "mail.send", "", "dead"]
    assert row[7:] == ["1", "broken"]
    assert page.links["mail.send"] == "/topics/mail.send"
    page = browser.get("/tasks", key="late")
    assert page.rows[1][4] == "waiting due"
    assert page.links["late"] == "/tasks/mail.send/late"
    page = browser.get("/tasks", group="user-1", wake_before="12h")
    assert page.rows[1][3] == "user-1"
    assert page.links["user-1"] == "/tasks?group=user-1"


def test_where_nothing_is_found_it_says_why_and_how_to_go_on(browser: Browser) -> None:
    page = browser.get("/tasks", topic="order.close", key="nobody", state="done")
    assert "Looked for: Topic “order.close”, Key “nobody”, State “done”" in page.text
    assert "done 1h, cancelled 1h, dead 14d" in page.text
    assert page.links["Key"] == "/tasks?topic=order.close&state=done"
    assert browser.get("/tasks", topic="ORDER").links["order.remind"] == "/tasks?topic=order.remind"
    page = browser.get("/tasks", key="order-007", group="nobody")
    assert "does not meet the other conditions" in page.text
    assert page.links["order.close / order-007"] == "/tasks/order.close/order-007"
    assert "begins or ends with a space" in browser.get("/tasks", topic="order.close ").text
    assert "leave out the state, or the times" in browser.get("/tasks", state="dead", wake_from="1h").text


@pytest.mark.parametrize(
    ("field", "query"),
    [
        ("wake_from", {"wake_from": "tomorrow"}), ("wake_before", {"wake_before": "<b>"}), ("state", {"state": "late"}),
        ("limit", {"limit": "1001"}), ("limit", {"limit": "0" * 5000}), ("limit", {"limit": "-1"}),
        ("topic", {"topic": "a\x00b"}), ("topic", {"topic": "x" * 201}), ("topic", {"topic": "bide:settings"}),
        ("key", {"key": "a\nb"}), ("group", {"group": "\u2028"}), ("cursor", {"cursor": "nonsense"}),
        ("cursor", {"cursor": "é"}), ("cursor", {"cursor": "kwAA"}),
    ],
)  # fmt: skip
def test_what_is_not_accepted_is_said_and_the_form_kept(browser: Browser, field: str, query: dict[str, str]) -> None:
    page = browser.get("/tasks", group="kept", **query) if field != "group" else browser.get("/tasks", **query)
    assert page.status == 422
    assert "A value is not accepted" in page.text
    assert f"{NAMES.get(field, field)}: \u2068" in page.text
    assert len(page.all("form", role="search")) == 1
    if field != "group":
        assert page.field("group") == "kept"


def test_a_cursor_of_another_list_is_refused(browser: Browser) -> None:
    following = browser.get("/tasks", topic="order.close", state="waiting").links["Next page"]
    cursor = parse_qs(urlsplit(following).query)["cursor"][0]
    assert browser.get("/tasks", state="dead", cursor=cursor).status == 422


@pytest.mark.parametrize(
    ("state", "verbs"),
    [
        ("waiting", ["move", "shift", "fire", "cancel"]), ("due", ["move", "shift", "cancel"]), ("dead", ["redrive"]),
        ("cancelled", []), ("", ["move", "shift", "fire", "redrive", "cancel"]),
    ],
)  # fmt: skip
def test_what_can_be_done(browser: Browser, state: str, verbs: list[str]) -> None:
    page = browser.get("/tasks", state=state)
    assert page.verbs == verbs
    assert bool(page.all("input", type="checkbox", name="ref")) is bool(verbs)
    if verbs:
        # Enter on a field presses the first button of a form: none that changes something
        first = page.all("button")[[one.get("class") for one in page.all("button")].index("primary") + 1]
        assert "disabled" in first


def test_the_form_means_what_is_shown(browser: Browser) -> None:
    page = browser.get("/tasks", topic="order.close", wake_from="9h", wake_before="2026-01-01")
    assert page.status == 200
    page = browser.get("/tasks", topic="order.close", state="due")
    assert "No task was found" in page.text
    page = browser.get("/tasks", state="due", topic="mail.send")
    fields = page.fields()
    assert {"topic": fields["topic"], "state": fields["state"]} == {"topic": "mail.send", "state": "waiting"}
    assert fields["wake_before"].endswith("Z")
    assert fields["back"] == "/tasks?state=due&topic=mail.send"
    assert len(fields["csrf"]) == 43
    [ref] = page.all("input", name="ref")
    assert (ref["value"] or "").startswith("mail.send/late@")
    assert len(page.all("input", name="scope")) == 2
    assert len(browser.get("/tasks", key="late").all("input", name="scope")) == 1


def test_all_on_a_page_can_be_chosen_without_scripts(browser: Browser) -> None:
    page = browser.get("/tasks", topic="order.close")
    chosen = browser.get(page.links["Choose all"])
    assert len(chosen.all("input", type="checkbox", name="ref", checked="")) == 0
    ticked = [one for one in chosen.all("input", name="ref") if "checked" in one]
    assert len(ticked) == 50
    assert not [one for one in page.all("input", name="ref") if "checked" in one]


def test_a_life_is_told_on_each_store(one: Running, browser: Browser) -> None:
    api = browser.api
    api.put("life", "1", delay="1h", group="lives")
    api.done("POST", "/v1/fire", [{"topic": "life", "key": "1"}])
    [task] = api.lease("life")
    assert api.settle(task, "retry", error="HTTP 503", delay="0s")
    [task] = api.lease("life", wait="60s")
    assert api.settle(task, "done")
    one.run(one.app.history.flush())
    page = browser.get("/tasks/life/1")
    assert "It is done: the delivery began " in page.text
    told = [row[:2] + row[7:8] for row in page.rows if len(row) == 9 and row[0] != "No."]
    assert told == [["2", "done", ""], ["1", "failure", "HTTP 503"]]
    assert [row[1:3] for row in page.rows if len(row) == 5 and row[0] != "When"] == [["anonymous", "fire_now: moved"]]
    assert "Nothing is known" not in page.text
    assert "It was moved; before that it was due at" in page.text
    assert keys(browser.get("/tasks", group="lives", state="done")) == ["1"]


def test_paused_topics_are_marked(empty: Running, visit: Visit) -> None:
    browser = visit(empty)
    browser.api.put("order.close", "42", delay="0s")
    empty.run(empty.app.pause("order.close", who="anna"))
    assert browser.get("/tasks").rows[1][4] == "waiting due paused"


def test_an_empty_store_and_a_key_of_a_topic_that_was_not_there_a_moment_ago(empty: Running, visit: Visit) -> None:
    browser = visit(empty)
    assert "There are no tasks yet" in browser.get("/tasks").text
    assert keys(browser.get("/tasks", key="42")) == []
    browser.api.put("order.close", "42")
    wait_until(lambda: keys(browser.get("/tasks", key="42")) == ["42"], "the topic to be known")


def test_names_that_paths_and_forms_would_change(empty: Running, visit: Visit) -> None:
    browser = visit(empty)
    changed_in_paths = [".", "..", "a/b", "a%2Fb", "?", "#", "a b", " a", "a ", ";", "é", "订单", "@", "a@1"]
    names = [*changed_in_paths, "+", "&", "=", '"', "'"]
    for name in names:
        browser.api.put(name, name, group=name)
    for name in names:
        page = browser.get("/tasks", topic=name, key=name, group=name)
        assert len(page.rows) == 2, name
        assert page.field("topic") == name
        hrefs = {one["href"] or "" for one in page.all("a")}
        [link] = {where for where in hrefs if where.startswith(("/tasks/", "/task?"))}
        assert "/../" not in link
        assert not link.endswith("/..")
        task = browser.get(link)
        assert task.status == 200, link
        assert task.fields()["ref"] == (page.all("input", name="ref")[0]["value"])
        assert browser.get(task.all("div", **{"data-every": "2000"})[0]["data-live"] or "").status == 200
        assert browser.get(task.links["Download"]).body == b"null"


def test_who_may_read_some_topics_sees_those_alone(visit: Visit) -> None:
    with running("memory:") as one:
        _, shop = one.run(make(one.app, "shop", verbs=frozenset({Verb.READ, Verb.CANCEL}), topics=("shop.*",)))
        for topic in ("shop.order", "shop.mail", "bank.payment"):
            for number in range(3):
                one.run(one.app.schedule(topic, key=f"{number}", group="all", delay=f"{number + 1}h"))
        browser = visit(one)
        page = browser.log_in(shop)
        assert {row[2] for row in page.rows[1:]} == {"shop.order", "shop.mail"}
        assert "6 tasks" in page.text
        assert page.verbs == ["cancel"]
        for query in ({"group": "all"}, {"state": "waiting"}, {"wake_before": "1d"}):
            pages = pages_from(browser, **query, limit=2)
            seen = [(row[2], row[1]) for page in pages for row in page.rows[1:]]
            assert seen == [(topic, str(number)) for topic in ("shop.mail", "shop.order") for number in range(3)]
        assert [row[2] for row in browser.get("/tasks", key="1").rows[1:]] == ["shop.mail", "shop.order"]


def test_counts_that_an_index_knows_and_those_it_does_not(visit: Visit) -> None:
    clock = ManualClock()
    with running("memory:", clock=clock) as one:
        one.run(_fill(one.app, clock.now()))
        browser = visit(one)
        assert "300 tasks" in browser.get("/tasks", state="waiting").text
        assert "200 tasks" in browser.get("/tasks", topic="a", state="waiting", wake_before="200m").text
        assert "199 tasks" in browser.get("/tasks", state="waiting", wake_from="1m", wake_before="200m").text
        assert "More than 50 tasks" in browser.get("/tasks", group="g").text
        assert "More than 50 tasks" in browser.get("/tasks", wake_before="200m").text


async def _fill(app: Bide, now: int) -> None:
    tasks = [
        app.new("a", None, key=f"{number:03d}", group="g", at=as_datetime(now + number * MINUTE))
        for number in range(300)
    ]
    await app.schedule_many(tasks)


def test_in_chinese_and_in_the_viewers_zone(visit: Visit) -> None:
    clock = ManualClock(1_900_000_000_000)  # 2030-03-17T17:46:40Z
    with running("memory:", clock=clock) as one:
        one.run(_fill(one.app, clock.now()))
        browser = visit(one, zone="Asia/Shanghai", language="zh-CN")
        page = browser.get("/tasks", wake_before="2030-03-18 01:48")
        assert keys(page) == ["000", "001"]
        assert "2 个任务" in page.text
        assert page.rows[2][5] == "2030-03-18 01:47:40 1分后"
        assert page.elements[0].attributes["lang"] == "zh-CN"
        page = browser.get("/tasks", wake_from="2030-03-17T17:47:00.000Z", wake_before="2030-03-17T17:48:00.001Z")
        assert keys(page) == ["001"]
        assert page.field("wake_from") == "2030-03-18 01:47:00"
        assert page.field("wake_before") == "2030-03-17T17:48:00.001Z"
        assert browser.get(f"/tasks?topic={quote('a')}&state=waiting").rows[1][4] == "等待中 到期"
