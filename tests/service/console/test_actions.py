"""Actions of the console, by its forms as a browser sends them: on one task, on those chosen, on all that match."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from tests.servers.keyspace import delete_keys
from tests.service.calling import Api, Running, running
from tests.service.console.forms import HOSTILE, FormBrowser, over
from tests.service.test_access import make

from bide.core.events import Event
from bide.core.instants import as_datetime
from bide.core.records import Filter
from bide.engine.bulk import Bulk, BulkVerb
from bide.engine.bulk_run import BulkState, Progress
from bide.engine.bulk_store import LOST_AFTER, BulkStore
from bide.engine.pauses import Pauses
from bide.service.callers import Verb
from bide.service.console.actions_form import inside
from bide.service.console.actions_page import NAMES, REASONS
from bide.service.console.phrases import translations
from bide.service.console.rendering import ref_field

HOUR = 3_600_000


@pytest.fixture(scope="module", params=["memory", "sqlite", "redis"])
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """An instance on each store."""
    own = "t" + secrets.token_hex(5)
    if request.param == "redis":
        server = request.getfixturevalue("redis_url")
        with running(f"{server}?namespace={own}&shards=4", keep_cancelled="1h") as found:
            yield found
        delete_keys(server, own)
    else:
        url = "memory:" if request.param == "memory" else f"sqlite:///{tmp_path_factory.mktemp('actions')}/tasks.db"
        with running(url, keep_cancelled="1h") as found:
            yield found


@pytest.fixture
def api(one: Running) -> Iterator[Api]:
    found = Api(one.url)
    yield found
    found.close()


@pytest.fixture
def browser(api: Api) -> FormBrowser:
    return FormBrowser(api)


@pytest.fixture
def topic() -> str:
    """One that no other test has."""
    return f"topic.{secrets.token_hex(6)}"


def fill(one: Running, topic: str, number: int, **more: str) -> None:
    async def work() -> None:
        app = one.app
        await app.schedule_many([app.new(topic, n, key=f"k{n:03}", **{"delay": "2h", **more}) for n in range(number)])  # type: ignore[arg-type]

    one.run(work())


def seen(one: Running, topic: str, key: str) -> tuple[str, str]:
    """The field of a form that names this task as it now is."""

    async def work() -> str:
        task = await one.app.get(topic, key)
        assert task is not None
        return ref_field(task.record)

    return "ref", one.run(work())


def noted(one: Running, topic: str, key: str, what: str) -> Event:
    """The newest event of a task, once it is this one: it is written down a moment after it happened."""
    while not (found := one.run(one.app.events(topic, key))) or found[0].what != what:
        pass
    return found[0]


# --- one


def test_one_task_is_changed_at_once(one: Running, browser: FormBrowser, api: Api, topic: str) -> None:
    fill(one, topic, 4)
    page = browser.send([("verb", "move"), seen(one, topic, "k000"), ("to", "9h")])
    assert browser.status == 200
    assert "Move: " in page.text
    assert " moved " in page.text
    assert "Was to wake at" in page.text
    due = api.get(topic, "k000")["due_at"]
    browser.send(
        [("verb", "shift"), ("scope", "chosen"), seen(one, topic, "k000"), ("by", "-1h"), ("back", "/changes?x=1")]
    )
    assert browser.where == "/changes?x=1&said=moved"
    assert api.get(topic, "k000")["due_at"] < due
    browser.send([("verb", "fire"), seen(one, topic, "k001")])
    assert api.lease(topic)[0]["key"] == "k001"
    browser.send([("verb", "cancel"), seen(one, topic, "k002"), ("back", "https://evil.example/")])
    assert browser.where == "/changes", "never to another site"
    assert api.get(topic, "k002")["state"] == "cancelled"
    assert noted(one, topic, "k002", "cancel: cancelled").who == "anonymous"


def test_a_stale_page_is_told_what_changed_meanwhile(one: Running, browser: FormBrowser, api: Api, topic: str) -> None:
    fill(one, topic, 1)
    ref = seen(one, topic, "k000")
    api.done("PATCH", f"/v1/topics/{topic}/tasks/k000", {"delay": "5h"})
    noted(one, topic, "k000", "reschedule: moved")
    page = browser.send([("verb", "cancel"), ref, ("back", "/changes")])
    assert browser.status == 409
    assert "Not done: stale_token" in page.text
    assert "somebody has changed it since" in page.text
    assert "As you saw it since" in page.text
    assert "reschedule: moved" in page.text
    assert "anonymous" in page.text
    assert api.get(topic, "k000")["state"] == "waiting"
    browser.press("Do it all the same, as it is now")
    assert api.get(topic, "k000")["state"] == "cancelled"
    noted(one, topic, "k000", "cancel: cancelled")
    page = browser.send([("verb", "fire"), ref])
    assert browser.status == 409
    assert "Not done: finished" in page.text
    assert "cancel: cancelled" in page.text
    fill(one, topic, 2)
    api.done("POST", "/v1/fire", [{"topic": topic, "key": "k001"}])
    [leased] = api.lease(topic)
    page = browser.send([("verb", "move"), seen(one, topic, "k001"), ("to", "1h")])
    assert "Not done: under_way" in page.text
    assert "Held by" in page.text
    assert api.settle(leased, "done")
    page = browser.send([("verb", "cancel"), ("ref", f"{topic}/nothing@5")])
    assert "Not done: not_found" in page.text


def test_a_move_past_the_deadline_is_refused(one: Running, browser: FormBrowser, topic: str) -> None:
    fill(one, topic, 1, deadline="3h")
    page = browser.send([("verb", "move"), seen(one, topic, "k000"), ("to", "5h")])
    assert browser.status == 409
    assert "Not done: refused the new time lies past its deadline" in page.text


# --- many


def test_all_that_match_are_previewed_confirmed_and_done_once(
    one: Running, browser: FormBrowser, api: Api, topic: str
) -> None:
    fill(one, topic, 25)
    before = api.get(topic, "k007")["due_at"]
    page = browser.send([("verb", "shift"), ("scope", "matching"), ("topic", topic), ("by", "1h"), ("pace", "")])
    assert browser.status == 200
    assert "Confirm: Shift" in page.text
    assert "25 tasks" in page.text
    assert "Each becomes due 1h later than it was asked for." in page.text
    assert page.tags.count("tr") == 11, "ten of them are shown"
    assert api.get(topic, "k007")["due_at"] == before, "nothing has happened"
    form = page.form("Shift: 25 tasks")
    browser.press("Shift: 25 tasks")
    ended = over(browser)
    assert "25 moved" in ended.text
    assert "dealt with, of 25" in ended.text
    where = browser.where
    browser.send([pair for pair in form.fields if pair[0] != "csrf"])
    assert browser.where == where, "a form that is sent again starts nothing"
    tasks = api.done("GET", f"/v1/tasks?topic={topic}&limit=100")["tasks"]
    assert {task["due_at"] for task in tasks} != {before}
    assert api.get(topic, "k007")["due_at"] > before
    event = noted(one, topic, "k007", "reschedule: moved")
    assert event.who == "anonymous"
    assert event.was is not None
    assert event.wake_at == event.was + HOUR
    page = browser.open("/changes")
    assert topic in page.text
    assert "anonymous" in page.text
    assert where in page.links


def test_those_chosen_are_done_with_the_reasons_for_those_that_were_not(
    one: Running, browser: FormBrowser, api: Api, topic: str
) -> None:
    fill(one, topic, 5)
    refs = [seen(one, topic, f"k{n:03}") for n in range(5)]
    api.done("PATCH", f"/v1/topics/{topic}/tasks/k001", {"delay": "5h"})
    noted(one, topic, "k001", "reschedule: moved")
    page = browser.send([("verb", "cancel"), ("scope", "chosen"), *refs])
    assert "4 tasks" in page.text
    assert "1 of those that you chose have changed or gone" in page.text
    assert "This cannot be undone" in page.text
    browser.press("Cancel: 4 tasks")
    ended = over(browser)
    assert "4 cancelled" in ended.text
    assert "1 stale_token" in ended.text
    assert "last by anonymous : reschedule: moved" in ended.text
    assert "seen as of" in ended.text
    assert api.get(topic, "k001")["state"] == "waiting"


def test_a_preview_warns_of_what_is_paused_and_what_is_under_way(
    one: Running, browser: FormBrowser, api: Api, topic: str
) -> None:
    fill(one, topic, 3)
    api.done("POST", "/v1/fire", [{"topic": topic, "key": "k002"}])
    assert api.lease(topic)
    pauses = Pauses(one.app.store, one.app.clock)
    one.run(pauses.pause(topic))
    page = browser.send([("verb", "fire"), ("scope", "matching"), ("topic", topic)])
    assert "1 of them are being delivered now: they will be left alone." in page.text
    assert "Paused, so that nothing of it is delivered until it is resumed:" in page.text
    page = browser.send([("verb", "cancel"), ("scope", "matching"), ("topic", topic)])
    assert "1 of them are being delivered now: their handlers are told to stop" in page.text
    assert "Paused" not in page.text
    page = browser.send([("verb", "fire"), seen(one, topic, "k000")])
    assert "Its topic is paused" in page.text
    one.run(pauses.resume(topic))


def test_nothing_that_matches_is_said(browser: FormBrowser, topic: str) -> None:
    page = browser.send([("verb", "cancel"), ("scope", "matching"), ("topic", topic)])
    assert "Nothing matches, so there is nothing to do." in page.text
    assert page.forms == [form for form in page.forms if form.action != "/changes"]


def test_times_are_fixed_by_the_preview(one: Running, browser: FormBrowser, topic: str) -> None:
    fill(one, topic, 2)
    page = browser.send(
        [("verb", "move"), ("scope", "matching"), ("topic", topic), ("to", "90m"), ("wake_before", "3h")]
    )
    fields = dict(page.form("Move: 2 tasks").fields)
    now = one.app.clock.now()
    for name, hours in (("to", 1.5), ("wake_before", 3)):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", fields[name])
        assert abs(as_datetime(now).timestamp() + hours * 3600 - _seconds(fields[name])) < 30
    browser.press("Move: 2 tasks")
    assert "2 moved" in over(browser).text


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ([("verb", "explode")], "verb"),
        ([("verb", "cancel")], "tasks"),
        ([("verb", "cancel"), ("scope", "some")], "scope"),
        ([("verb", "cancel"), ("ref", "nonsense")], "ref"),
        ([("verb", "move"), ("scope", "matching"), ("to", "tomorrow")], "to"),
        ([("verb", "move"), ("scope", "matching")], "to"),
        ([("verb", "shift"), ("scope", "matching"), ("by", "0s")], "by"),
        ([("verb", "shift"), ("scope", "matching"), ("by", "5 apples")], "by"),
        ([("verb", "cancel"), ("scope", "matching"), ("pace", "fast")], "pace"),
        ([("verb", "cancel"), ("scope", "matching"), ("state", "dead")], "state"),
        ([("verb", "cancel"), ("scope", "matching"), ("topic", "bide:settings")], "topic"),
        ([("verb", "cancel"), ("scope", "matching"), ("confirm", "yes"), ("id", "../x")], "id"),
        ([("verb", "shift"), ("by", "1h"), ("scope", "matching"), ("since", "-4")], "since"),
    ],
)
def test_bad_fields_are_named(browser: FormBrowser, fields: list[tuple[str, str]], field: str) -> None:
    page = browser.send(fields)
    assert browser.status == 422
    assert field in page.text


def test_deadlines_are_shifted_along_where_one_says_so(
    one: Running, browser: FormBrowser, api: Api, topic: str
) -> None:
    fill(one, topic, 3, deadline="3h")
    asked = [("verb", "shift"), ("scope", "matching"), ("topic", topic), ("by", "5h")]
    assert "left alone: past its deadline" in browser.send(asked).text
    browser.press("Shift: 3 tasks")
    ended = over(browser)
    assert "3 refused" in ended.text
    assert "the new time lies past its deadline" in ended.text
    browser.send(asked)
    browser.press("Shift: 3 tasks", ticked=["yes"])
    ended = over(browser)
    assert "3 moved" in ended.text
    assert "Deadlines move along." in ended.text


# --- progress


def test_it_is_stopped_and_gone_on_with(one: Running, browser: FormBrowser, api: Api, topic: str) -> None:
    fill(one, topic, 60)
    due = {task["key"]: task["due_at"] for task in _all(api, topic)}
    browser.send([("verb", "shift"), ("scope", "matching"), ("topic", topic), ("by", "1h")])
    browser.press("Shift: 60 tasks", pace="5")
    assert "5 per second" in browser.page.text
    where = browser.where
    live = browser.open(f"{where}/live")
    assert "html" not in live.tags
    while " moved" not in browser.open(where).text:
        pass
    browser.press("Stop")
    stopped = over(browser)
    assert "Stopped by anonymous" in stopped.text
    browser.press("Go on with what is left")
    left = re.search(r"(\d+) tasks Each becomes due", browser.page.text)
    assert left is not None, browser.page.text
    assert 0 < int(left[1]) < 60
    browser.press(f"Shift: {left[1]} tasks", pace="")
    assert f"{left[1]} moved" in over(browser).text
    moved = {task["key"]: task["due_at"] for task in _all(api, topic)}
    assert {_seconds(moved[key]) - _seconds(due[key]) for key in due} == {3600}, "each once"


def _all(api: Api, topic: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = api.done("GET", f"/v1/tasks?topic={topic}&limit=500")["tasks"]
    return found


def test_one_that_lost_its_instance_says_what_was_done(one: Running, browser: FormBrowser, topic: str) -> None:
    fill(one, topic, 3)
    now = one.app.clock.now() - LOST_AFTER - 5_000
    progress = Progress(
        id="018f3c5e-aaaa-7bbb-8ccc-" + secrets.token_hex(6), chosen=0, who="ann", instance="gone:1234", asked_at=now,
        bulk=Bulk(verb=BulkVerb.CANCEL, where=Filter(topic=topic), pace=5), alive_at=now, started_at=now,
        state=BulkState.RUNNING, looked=4, total=7, counts={"cancelled": 4},
    )  # fmt: skip

    async def work() -> bool:
        return await BulkStore(one.app).begin(progress)

    assert one.run(work())
    page = browser.open(f"/changes/{progress.id}")
    assert "Broken off: its instance has given no sign of life" in page.text
    assert "dealt with, of 7" in page.text
    assert "Stop" not in [each["text"] for form in page.forms for each in form.buttons]
    browser.press("Go on with what is left")
    assert dict(browser.page.form("Cancel: 3 tasks").fields)["pace"] == "5"
    browser.press("Cancel: 3 tasks", pace="")
    assert "3 cancelled" in over(browser).text


def test_a_change_that_is_not_there(browser: FormBrowser) -> None:
    assert "No such change" in browser.open("/changes/018f3c5e-aaaa-7bbb-8ccc-0123456789ab").text
    assert browser.status == 404
    browser.open("/changes/nonsense")
    assert browser.status == 422


# --- who may


def test_rights_hold_for_each_task(tmp_path: Path) -> None:
    with running(f"sqlite:///{tmp_path}/tasks.db") as one:
        for topic in ("mine.a", "mine.b", "theirs"):
            fill(one, topic, 3)
        token = one.run(_token(one, "ann", [Verb.READ, Verb.CANCEL], ["mine.*"]))
        watcher = one.run(_token(one, "bo", [Verb.READ], ["*"]))
        api = Api(one.url)
        browser = FormBrowser(api)
        browser.log_in(token)
        page = browser.send([("verb", "cancel"), ("scope", "matching")])
        assert "6 tasks" in page.text
        assert "theirs" not in page.text
        browser.press("Cancel: 6 tasks")
        assert "6 cancelled" in over(browser).text
        where = browser.where
        for fields in (
            [("verb", "cancel"), ("scope", "matching"), ("topic", "theirs")],
            [("verb", "fire"), ("scope", "matching")],
            [("verb", "cancel"), ("scope", "chosen"), ("ref", "theirs/k000@1"), ("ref", "mine.a/k000@1")],
        ):
            browser.send(fields)
            assert browser.status == 403, fields
        other = FormBrowser(api)
        other.log_in(watcher)
        assert "6 cancelled" in other.open(where).text, "whoever may read all topics may look"
        other.send([], f"{where}/stop")
        assert other.status == 403
        other.send([("verb", "cancel"), ("scope", "matching")])
        assert other.status == 403
        forged = api(
            "POST", "/changes", body=b"verb=cancel&scope=matching&confirm=yes",
            headers={"content-type": "application/x-www-form-urlencoded", "cookie": browser._headers["cookie"]},
        )  # fmt: skip
        assert forged.status == 403
        assert one.run(one.app.tally()).number("theirs") == 3
        api.close()


async def _token(one: Running, name: str, verbs: list[Verb], topics: list[str]) -> str:
    _, header = await make(one.app, name, frozenset(verbs), tuple(topics))
    return header.split()[1]


# --- what is shown


def test_what_comes_from_outside_is_inert(one: Running, browser: FormBrowser, api: Api) -> None:
    harmless, hostile = "plain.topic", HOSTILE
    pages = []
    for topic in (harmless, hostile):
        key = topic + "k"
        for n in range(3):
            one.run(one.app.schedule(topic, None, key=f"{key}{n}", group=topic, delay="1h", deadline="2h"))
        texts = [browser.send([("verb", "shift"), ("scope", "matching"), ("group", topic), ("by", "5h")])]
        browser.press("Shift: 3 tasks")
        texts += [over(browser), browser.open(browser.where + "/live")]
        ref = seen(one, topic, f"{key}0")
        one.run(one.app.reschedule(topic, f"{key}0", delay="30m"))
        texts.append(browser.send([("verb", "cancel"), ref]))
        pages.append(texts)
    for plain, odd in zip(*pages, strict=True):
        assert odd.tags == plain.tags
        assert odd.attributes == plain.attributes
        assert "\u202e" not in odd.text
        assert "{{7*7}}" in odd.text


def test_every_sentence_has_its_chinese(browser: FormBrowser, one: Running, api: Api, topic: str) -> None:
    known = translations("zh")
    folder = Path(__file__).resolve().parents[3] / "src/bide/service/console/templates"
    said = {*NAMES.values(), *REASONS.values(), *REASONS}
    for template in sorted([*folder.glob("change*.html"), *folder.glob("dead*.html")]):
        said |= {found[1] for found in re.findall(r"\bt\((\"|')(.+?)\1", template.read_text(encoding="utf-8"))}
    missing = {one for one in said if one not in known}
    assert missing == set()
    chinese = FormBrowser(api, "zh-CN")
    fill(one, topic, 2)
    page = chinese.send([("verb", "cancel"), ("scope", "matching"), ("topic", topic)])
    assert "确认：取消" in page.text
    chinese.press("取消 2 个任务")
    assert "已取消" in chinese.page.text or "进行中" in chinese.page.text


@pytest.mark.parametrize(
    ("where", "inner"),
    [("/tasks?a=b", True), ("//evil", False), ("/\\evil", False), ("https://evil", False), ("", False), ("/ü", False)],
)
def test_back_leads_nowhere_else(where: str, inner: bool) -> None:
    assert (inside(where) == where) is inner


def test_stopping_the_service_leaves_what_was_done_and_says_so(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tasks.db"
    with running(url) as one:
        fill(one, "t", 50)
        api = Api(one.url)
        browser = FormBrowser(api)
        browser.send([("verb", "cancel"), ("scope", "matching"), ("topic", "t")])
        browser.press("Cancel: 50 tasks", pace="2")
        where = browser.where
        api.close()
    with running(url) as one:
        api = Api(one.url)
        browser = FormBrowser(api)
        page = browser.open(where)
        assert "Stopped as the service ended" in page.text
        browser.press("Go on with what is left")
        left = one.run(one.app.tally()).number("t")
        browser.press(f"Cancel: {left} tasks", pace="")
        assert f"{left} cancelled" in over(browser).text
        assert one.run(one.app.tally()).number("t") == 0
        api.close()
