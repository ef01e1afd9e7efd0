"""The overview, the topics and each one's page: what is shown to whom, pause and resume, and that all is harmless."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.service.calling import Running, running
from tests.service.console.browsing import Browser, Page
from tests.service.console.conftest import Visit
from tests.service.test_access import make
from tests.waiting import until

from bide import Bide, Ladder, Task
from bide.core.names import SHOWN_TOPIC
from bide.engine.history import MINUTE, DeliveryCounts, MinuteRow, _encode, bucket_of
from bide.engine.registry import Channel, RouteSettings, announced_routes
from bide.engine.settings_store import SettingsStore
from bide.insight.minute_log import QUARTER, QUARTERS, Flow, Quarter
from bide.service.access import Verb
from bide.service.console.i18n import Locale, translations
from bide.service.console.overview import bars, grade, wake_up_status
from bide.service.console.topics import HEIGHT, WIDTH, day_chart, rate, retry_chart
from bide.service.health import Level
from bide.service.serving import ServeConfig, TopicConfig, WebhooksConfig


def test_an_empty_store_says_what_to_do_first(one: Running, browser: Browser) -> None:
    page = shown(browser)
    assert "There is nothing here yet" in page.words
    assert f"curl -X PUT {one.url}/v1/topics/hello/tasks/1 " in page.words
    [command] = re.findall(r"-d '(\{.*?\})'", page.words)
    reply = browser.api("PUT", "/v1/topics/hello/tasks/1", body=command.encode())
    assert reply.status == 201, reply
    page = shown(browser)
    assert "There is nothing here yet" not in page.words
    assert "Pending 1 " in page.words


def test_what_it_shows(url: str, visit: Visit) -> None:
    with running(url) as one:
        browser = visit(one)
        api = browser.api
        api.dead("broken", "1")
        for key in ("1", "2", "3"):
            api.put("held", key, delay="0s")
        [held] = api.lease("held", 1)
        api.put("held", "3", delay="0s")  # of a topic that somebody has asked for
        api.lease("later", 1)
        api.put("later", "1", delay="1h")
        one.run(one.app.pause("held", who="anna"))
        one.run(one.app.history.flush())
        page = shown(browser)
        assert "Pending 3 Due now 2 the oldest for" in page.words
        assert "Leased 1 " in page.words
        assert "Dead 1 given up" in page.words
        assert re.search(r"Lateness, p99 [0-9.]+ ?m?s", page.words)
        assert "Held back by a pause held : 2 due; paused since" in page.words
        assert ", anna" in page.words
        assert f"anonymous@{one.serving.instance} a consumer, or a worker that is gone held 1 0" in page.words
        assert "ok: store it answers" in page.words
        assert "wake-ups last received" in page.words or url.startswith("redis"), "there one's own are no notifications"
        assert {"/tasks?state=waiting", "/tasks?state=due", "/tasks?state=leased", "/dead", "/topics/held"} <= set(
            page.hrefs
        )
        assert page.all("svg")
        part = shown(browser, "/overview/live")
        assert not part.all("html")
        assert "Due now 2" in part.words
        assert api.settle(held, "done")


def test_everybody_sees_what_they_may(one: Running, browser: Browser) -> None:
    some, entire = (one.run(make(one.app, "ann", frozenset(Verb), topics))[1] for topics in (("mine.*",), ("*",)))
    one.run(_work(one, "mine.a", 2))
    one.run(_work(one, "yours", 3))
    page = browser.log_in(entire, "/")
    assert "Pending 3 " in page.words
    assert "Scheduled / s" in page.words
    assert "yours" in page.words
    page = browser.log_in(some, "/")
    assert "Pending 1 Due now 1 " in page.words
    assert "Leased 1 " in page.words
    assert "yours" not in page.words
    assert "Scheduled / s" not in page.words
    assert "You see only the topics that you may read." in page.words


async def _work(one: Running, topic: str, number: int) -> None:
    """So many tasks, one of them held by somebody, a pause, and a worker."""
    app, now = one.app, one.app.clock.now()
    await app.schedule_many([app.new(topic, key=str(key), delay="0s") for key in range(number)])
    await app.store.lease({topic: 1}, now=app.clock.now(), until=now + 600_000, holder="me")
    await app.pause(topic)
    await app.store.announce(f"worker of {topic}", [topic], now + 600_000, now=now)  # type: ignore[attr-defined]
    await app.history.flush()


def test_bars() -> None:
    assert bars([]) == bars([0] * 60) == ""
    assert bars([0] * 58 + [1, 1_000]) == "M232 40v-1h3v1zM236 40v-40h3v40z"


def test_what_is_wake_up_status() -> None:
    class Viewer:
        """Tells which sentence was asked for."""

        locale = Locale("en", "UTC", UTC, 0)

        def t(self, english: str, **values: object) -> str:
            assert english in translations("zh"), english
            return "* " + english.format(**values)

    def words(**changes: object) -> tuple[Level, str]:
        well = Channel(notifies=True, loops=2, heard=3, heard_ago=4.2, missed=0, missed_lately=False)
        return wake_up_status(Viewer(), replace(well, **changes))  # type: ignore[arg-type]

    assert words() == (Level.OK, "* last received 4.2s ago")
    assert words(missed=2) == (Level.OK, "* last received 4.2s ago · * 2 missed since the start")
    assert words(missed=2, missed_lately=True)[0] is Level.WARNING
    assert words(heard_ago=None) == (Level.OK, "* none received here so far")
    assert words(notifies=False) == (Level.OK, "* this store sends none: its workers poll")


@pytest.mark.parametrize(("late", "expected"), [(None, ""), (0, "good"), (95, "good"), (120, "warn"), (2_000, "bad")])
def test_how_late_is_bad(late: int | None, expected: str) -> None:
    past = DeliveryCounts() if late is None else DeliveryCounts(begun=1, late={bucket_of(late): 1})
    assert grade(Flow(60_000, past, 0)) == expected
    assert grade(None) == ""


def shown(browser: Browser, path: str = "/", status: int = 200) -> Page:
    page = browser.get(path)
    assert page.status == status, page
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    return page


async def write_past(app: Bide, minutes_ago: int, **topics: DeliveryCounts) -> None:
    """As if a process had written it then."""
    minute = app.clock.now() // MINUTE - minutes_ago
    kept, row = SettingsStore(app.store, app.clock, SHOWN_TOPIC), _encode(MinuteRow(0, topics))
    await kept.put(f"minute:{minute}:tests", row, until=(minute + 1) * MINUTE + 25 * 60 * MINUTE)


def past(done: int = 0, retried: int = 0, dead: int = 0, late: int = 0) -> DeliveryCounts:
    begun = done + retried + dead
    return DeliveryCounts(begun, done, retried, 0, dead, {bucket_of(late): begun})


def test_without_any_topic(browser: Browser) -> None:
    page = shown(browser, "/topics")
    assert "There are no topics yet" in page.words
    assert not page.actions


def test_the_list_on_each_store(url: str, visit: Visit) -> None:
    with running(url) as one:
        browser = visit(one)
        api = browser.api
        api.put("later", "1", delay="1h")
        api.put("now", "1", delay="0s")
        api.put("now", "2", delay="0s")
        api.lease("now", 1)
        api.dead("broken", "1")
        one.run(one.app.pause("now", who="anna"))
        one.run(one.app.history.flush())
        one.run(write_past(one.app, 20, later=past(done=58, retried=2, late=40)))
        page = shown(browser, "/topics")
        assert re.search(r"broken 0 0 – 0 1 [0-9.]+ m?s 0 <0.1 0 Pause", page.words), page.words
        assert re.search(r"later 1 0 – 0 0 43 ms 1 <0.1 0 Pause", page.words), page.words
        assert re.search(r"now paused 1 1 \S+( ms)? 1 0 [0-9.]+ m?s 0 0 0 Resume", page.words), page.words
        assert {"/topics/later", "/topics?sort=-topic", "/topics?sort=-due", "/dead?topic=broken"} <= set(page.hrefs)
        part = shown(browser, "/topics?part=live")
        assert not part.all("html")
        assert "now paused 1 1" in part.words


def test_it_is_sorted_as_the_address_says(browser: Browser) -> None:
    for topic, number in (("a", 2), ("b", 3), ("c", 1)):
        for key in range(number):
            browser.api.put(topic, str(key))

    def order(path: str) -> list[str]:
        links = shown(browser, path).hrefs
        return [link.rpartition("/")[2] for link in links if re.fullmatch("/topics/[abc]", link)]

    assert order("/topics") == ["a", "b", "c"]
    assert order("/topics?sort=-topic") == ["c", "b", "a"]
    assert order("/topics?sort=waiting") == ["c", "a", "b"]
    assert order("/topics?sort=-waiting") == ["b", "a", "c"]
    assert order("/topics?sort=nonsense") == ["a", "b", "c"]
    for column in ("due", "oldest", "leased", "dead", "late", "done", "failing", "workers"):
        assert sorted(order(f"/topics?sort=-{column}")) == ["a", "b", "c"]


def test_pause_and_resume_by_their_buttons(one: Running, browser: Browser) -> None:
    browser.api.put("t", "k", delay="0s")
    page = shown(browser, "/topics")
    assert page.actions == ["/topics/t/pause"]
    page = browser.send([("from", "list"), ("sort", "-due")], "/topics/t/pause")
    assert browser.where == "/topics?sort=-due&done=paused&of=t"
    assert "t : It is paused: its tasks are not delivered" in page.words
    assert page.actions == ["/topics/t/resume"]
    assert one.run(one.app.paused())["t"].who == "anonymous"
    assert browser.api.done("POST", "/v1/lease", {"topics": {"t": 1}}) == {"tasks": [], "paused": ["t"]}
    page = shown(browser, "/topics/t")
    assert "Paused Since" in page.words
    assert "paused by anonymous ." in page.words
    assert "It was already paused; nothing changed." in browser.send([], "/topics/t/pause").words
    page = browser.send([], "/topics/t/resume")
    assert browser.where == "/topics/t?done=resumed"
    assert "It is resumed:" in page.words
    assert page.actions == ["/topics/t/pause"]
    assert "It was not paused; nothing changed." in browser.send([], "/topics/t/resume").words
    assert len(browser.api.lease("t")) == 1


def test_who_may_see_and_do_what(one: Running, visit: Visit) -> None:
    async def work() -> list[str]:
        for topic in ("mine.a", "yours"):
            await one.app.schedule(topic, key="k", delay="1h")
        return [
            (await make(one.app, name, frozenset(verbs), (topic,)))[1]
            for name, verbs, topic in (
                ("reader", {Verb.READ}, "mine.*"), ("boss", set(Verb), "*"), ("pauser", {Verb.ADMIN}, "mine.*"),
            )
        ]  # fmt: skip

    reader, boss, pauser = one.run(work())
    browser = visit(one)
    page = browser.log_in(boss, "/topics")
    assert {"/topics/mine.a/pause", "/topics/yours/pause"} == set(page.actions) - {"/logout"}

    page = browser.log_in(reader, "/topics")
    assert set(page.actions) == {"/logout"}
    assert browser.post("/topics/mine.a/pause", {"csrf": page.csrf}).status == 403
    assert shown(browser, "/topics/mine.a").actions == ["/logout"]

    page = browser.log_in(pauser, "/topics")
    assert page.status == 403
    done = browser.post("/topics/mine.a/pause", {"csrf": page.csrf})
    assert done.status == 303
    assert one.run(one.app.paused())["mine.a"].who == "pauser"


def test_a_topic_that_nobody_works_on_says_so(browser: Browser) -> None:
    browser.api.put("left", "k", delay="0s")
    page = shown(browser, "/topics/left")
    assert "No worker handles this topic Its oldest task has been due for" in page.words
    assert "no worker reported this topic in the last day" in page.words, "and how the service would try again"
    assert "and 0 more" not in page.words
    assert "then dead: 12 tries in all" in page.words
    assert "left no worker" in shown(browser, "/topics").words
    assert {"/tasks?topic=left", "/dead?topic=left", "/timeline?topic=left"} <= set(page.hrefs)


@pytest.mark.parametrize("url", ["sqlite", "redis"], indirect=True)
def test_who_works_on_a_topic_and_how(url: str, visit: Visit) -> None:
    """Another app tells it, so it has to be a store that can be shared."""
    config = ServeConfig(
        topics={
            "hook": TopicConfig(webhook="http://127.0.0.1:9/secret-path", retry=["1s", "1m", "1h"], concurrency=7),
            "asked.for": TopicConfig(retry="never"),
        },
        webhooks=WebhooksConfig(allow=["127.0.0.1:9"]),
    )
    with running(url, config) as one:
        topics = ("order.close", "hook", "asked.for")

        async def routes() -> set[str]:
            return {found.route.topic for found in await announced_routes(one.app.store, one.app.clock)}

        async def told() -> bool:
            return await asyncio.to_thread(one.run, routes()) >= set(topics)

        async def work() -> list[Page]:
            other = Bide(url)

            @other.handler("order.close", retry=Ladder("15s", "3m"), timeout="30s", concurrency=50)
            async def close(task: Task[Any]) -> None:
                """Closes it."""

            async with other.worker(name="worker-7"):
                _: bool = await until(told, "all topics to be told of")
                return [await asyncio.to_thread(shown, browser, f"/topics/{topic}") for topic in topics]

        browser = visit(one)
        handler, hook, asked = asyncio.run(work())
        assert "worker-7" in handler.words
        assert "Handler test_topics" not in handler.words
        assert re.search(r"Handler \S*close", handler.words)
        assert "50 at once in each process Timeout 30s" in handler.words
        assert re.search(r"1 15s 15s 2 3m 3m 15s then dead: 3 tries in all", handler.words), handler.words
        assert "Webhook 127.0.0.1:9" in hook.words
        assert "7 at once in each process" in hook.words
        assert "secret-path" not in hook.words
        assert one.serving.instance in hook.words
        assert "Consumers over HTTP" in asked.words
        assert "dead at the first failure" in asked.words


def test_its_last_day(one: Running, browser: Browser) -> None:
    browser.api.put("t", "k")
    one.run(write_past(one.app, 10, t=past(done=90, retried=9, dead=1, late=20)))
    one.run(write_past(one.app, 700, t=past(done=10, late=5_000)))
    one.run(write_past(one.app, 3, other=past(done=7)))
    page = shown(browser, "/topics/t")
    assert "Done 100 Retried 9 Dead 1" in page.words
    assert "at most 100 in a quarter of an hour" in page.words
    assert re.search(r"100 90 9 0 1 21 ms 21 ms", page.words), page.words
    assert re.search(r"10 10 0 0 0 5.1s 5.1s", page.words), page.words
    assert len(page.all("svg")) >= 2
    browser.api.put("quiet", "k")
    assert "Nothing was delivered in the last day." in shown(browser, "/topics/quiet").words


def test_what_nobody_knows(browser: Browser) -> None:
    page = shown(browser, "/topics/never-heard-of", 404)
    assert "Nothing is known of this topic" in page.words
    assert page.actions == ["/topics/never-heard-of/pause"], "it can be paused before its first task"
    assert browser.get("/topics/bide%3Asettings").status in (403, 422)
    assert browser.get("/topics/%0a").status == 422


# --- what is drawn


def test_rates_are_short() -> None:
    assert [rate(number) for number in (0, 0.01, 0.1, 0.97, 1.04, 9.94, 12.3, 1_234)] == [
        "0", "<0.1", "0.1", "1", "1", "9.9", "12", "1,234",
    ]  # fmt: skip


def test_a_ladder_is_drawn_by_its_logarithm() -> None:
    ladder = retry_chart(RouteSettings(topic="t", kind="handler", pauses=[100, 1_000, 10_000], tries=24))
    assert [rung.width for rung in ladder.bars] == sorted(rung.width for rung in ladder.bars)
    assert ladder.bars[-1].width == 100
    assert [rung.after for rung in ladder.bars] == [100, 1_100, 11_100]
    assert ladder.left == 20
    assert retry_chart(RouteSettings(topic="t", kind="handler", tries=1)) == ([], 1, 0)
    assert retry_chart(RouteSettings(topic="t", kind="handler", pauses=[0, 0], tries=3)).bars[0].width == 1
    assert retry_chart(RouteSettings(topic="t", kind="handler", pauses=[5], tries=None)).left == 0


numbers = st.integers(0, 10**6)


@given(st.lists(st.tuples(numbers, numbers, numbers, st.integers(0, 10**9)), min_size=1, max_size=QUARTERS))
def test_whatever_happened_stays_within_the_picture(quarters: list[tuple[int, int, int, int]]) -> None:
    day = day_chart([Quarter(place * QUARTER, past(*its)) for place, its in enumerate(quarters)])
    assert day is not None
    assert day.most == max(sum(its[:3]) for its in quarters)
    for path in (day.done, day.retried, day.dead):
        for x, y, height in re.findall(r"M(\d+) (-?\d+)v-(\d+)h\d+v\d+z", path):
            assert 0 <= int(x) < WIDTH
            assert 0 < int(height) <= HEIGHT
            assert int(y) - int(height) >= 0
    for path in (day.half, day.nearly_all):
        assert all(0 <= int(y) <= HEIGHT for y in re.findall(r"M\d+ (-?\d+)", path) + re.findall(r"V(-?\d+)", path))
    assert day_chart([]) is None
