"""The page of one task, its forms, and its timeline."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.service.calling import Running, running
from tests.service.console.browsing import Browser, Page
from tests.service.console.conftest import Visit
from tests.service.test_access import make

from bide import Bide, Ladder
from bide.core.instants import Millis, as_datetime, instant
from bide.core.records import OutcomeKind, Ref, Settlement
from bide.service.access import Verb
from bide.service.console.i18n import inert_line
from bide.service.console.rendering import MOST_SHOWN, dump, payload_view, pretty
from bide.testing import ManualClock

START = 1_900_000_020_000  # 2030-03-17T17:47:00Z, a whole minute
MINUTE = 60_000
TOPIC = "order.close"


class World:
    """An instance whose clock stands still until it is moved, somebody who calls it, and somebody who looks."""

    def __init__(self, service: Running, clock: ManualClock) -> None:
        self.service = service
        self.clock = clock
        self.browser = Browser(service.url)
        self.api = self.browser.api

    def page(self, key: str = "4711", topic: str = TOPIC, **query: object) -> Page:
        return self.browser.get(f"/tasks/{topic}/{key}", **query)

    def lease(self, key: str = "4711") -> Any:
        [task] = self.api.lease(TOPIC)
        assert task["key"] == key
        return task

    def schedule(self, payload: object, key: str = "4711", **options: Any) -> None:
        when = {} if "at" in options else {"delay": "0s"}
        self.service.run(self.service.app.schedule(TOPIC, payload, key=key, **when | options))

    def flush(self) -> None:
        self.service.run(self.service.app.history.flush())

    def close(self) -> None:
        self.browser.close()


@pytest.fixture
def world() -> Iterator[World]:
    """Of the stores, test_tasks.py plays a life on each."""
    yield from worlds()


def worlds() -> Iterator[World]:
    clock = ManualClock(START)
    with running("memory:", keep_done="1h", keep_cancelled="1h", clock=clock) as service:
        found = World(service, clock)
        yield found
        found.close()


@pytest.fixture(scope="module")
def calm() -> Iterator[World]:
    """One that tests share which look at one task each, scheduled anew."""
    yield from worlds()


def deliveries(page: Page) -> list[list[str]]:
    """The table of deliveries, the newest first: number, outcome, planned, began, late, took, worker, error, next."""
    return [row for row in page.rows if len(row) == 9 and row[0] != "No."]


def changes(page: Page) -> list[list[str]]:
    return [row for row in page.rows if len(row) == 5 and row[0] != "When"]


def fact(page: Page, name: str) -> str:
    """A row of the table of times."""
    [found] = [row for row in page.rows if row and row[0] == name]
    return " ".join(found[1:])


# --- a life


def test_one_that_waits(world: World) -> None:
    world.api.put(TOPIC, "4711", delay="15m", group="user-7", payload={"order": 4711})
    page = world.page()
    assert page.status == 200
    assert "waiting It waits until it is due, in 15m." in page.text
    assert fact(page, "Due, as requested") == "2030-03-17 18:02:00.000 in 15m"
    assert fact(page, "Scheduled") == "2030-03-17 17:47:00.000 now"
    assert page.links["user-7"] == "/tasks?group=user-7"
    assert page.links[TOPIC] in (f"/topics/{TOPIC}", f"/tasks?topic={TOPIC}")
    assert "There were none yet." in page.text
    assert '{ "order": 4711 }' in page.text
    assert page.verbs == ["move", "shift", "fire", "cancel"]
    fields = page.fields()
    assert fields["scope"] == "chosen"
    assert fields["back"] == f"/tasks/{TOPIC}/4711"
    assert fields["ref"].startswith(f"{TOPIC}/4711@")
    assert page.field("to") == "2030-03-17 18:02:00"


def test_why_an_order_closed_late(world: World) -> None:
    """Forty others were due in its minute, and all of them were as late."""
    for number in range(40):
        world.api.put(TOPIC, f"other-{number}", delay="5m")
    world.api.put(TOPIC, "4711", delay="5m")
    world.clock.advance(5 * MINUTE + 4_000)
    tasks = world.api.lease(TOPIC, 100)
    world.clock.advance(120)
    for task in tasks:
        assert world.api.settle(task, "done")
    world.flush()
    page = world.page()
    assert "done It is done: the delivery began 4s after it was due and took 120 ms." in page.text
    assert fact(page, "Lateness").startswith("4s ")
    assert "Why it was not on time" in page.text
    assert world.browser.get(page.links["See that time on the timeline"]).status == 200
    assert "Delivery 1 began 4s late." in page.text
    assert "40 other tasks of this topic were planned for the same minute, 17:52." in page.text
    assert "Of the 41 deliveries of this topic that began at 17:52, half were at most 4s late" in page.text
    assert "So most of the topic was late then" in page.text
    assert [row[:2] for row in deliveries(page)] == [["1", "done"]]
    assert deliveries(page)[0][2:6] == ["2030-03-17 17:52:00.000", "2030-03-17 17:52:04.000", "4s", "120 ms"]
    assert page.verbs == []


def test_one_that_was_late_alone(world: World) -> None:
    for number in range(40):
        world.api.put(TOPIC, f"other-{number}", delay="5m")
    world.clock.advance(5 * MINUTE)
    for task in world.api.lease(TOPIC, 100):
        world.api.settle(task, "done")
    world.api.put(TOPIC, "4711", delay="0s")
    world.clock.advance(9_000)
    world.api.settle(world.lease(), "done")
    world.flush()
    page = world.page()
    assert "half were at most 0 ms late" in page.text
    assert "So most others were on time" in page.text


def test_nobody_worked_for_a_while(world: World) -> None:
    world.api.put(TOPIC, "4711", delay="1m")
    world.clock.advance(9 * MINUTE + 30_000)
    world.api.settle(world.lease(), "done")
    world.flush()
    assert "From 17:49 to 17:56 no delivery of this topic began" in world.page().text


def test_failed_deliveries_and_the_pauses_between_them(world: World) -> None:
    world.api.put(TOPIC, "4711", delay="1m")
    for error, pause in (("HTTP 503: <b>overloaded</b>", "15s"), ("timeout\nafter 30 s", "30s")):
        world.clock.advance(MINUTE)
        task = world.lease()
        world.clock.advance(70)
        assert world.api.settle(task, "retry", error=error, delay=pause)
    page = world.page()
    assert "waiting It waits for its retry, in 30s; failed so far: 2." in page.text
    assert [row[:2] + row[4:6] + row[7:8] for row in deliveries(page)] == [
        ["2", "failure", "45s", "70 ms", "timeout⏎after 30 s"],
        ["1", "failure", "0 ms", "70 ms", "HTTP 503: <b>overloaded</b>"],
    ]
    assert "Its first delivery was on time, 0 ms after it was due, and failed." in page.text
    assert "2 deliveries failed; the pauses before the retries come to 45s." in page.text
    world.clock.advance(30_000)
    world.api.settle(world.lease(), "dead", error="no such order")
    page = world.page()
    assert "dead It is dead, now: nothing more happens unless it is redriven." in page.text
    assert deliveries(page)[0][1] == "dead"
    assert page.verbs == ["redrive"]
    assert "no such order" in page.text


def test_the_trace_of_the_last_exception(world: World) -> None:
    world.api.put(TOPIC, "4711", delay="0s")
    task, store, now = world.lease(), world.service.app.store, world.clock.now()
    ended = Settlement(
        TOPIC, "4711", task["token"], OutcomeKind.DEAD, keep_until=now + MINUTE, error="E: <b>\n\x1fFile <i>\n"
    )
    assert world.service.run(store.settle([ended], now=now)) == [True]
    page = world.page()
    assert "Last error E: <b> Trace File <i> Deliveries" in page.words
    assert deliveries(page)[0][7] == "E: <b>"
    assert "File" not in world.browser.get("/tasks", topic=TOPIC).words
    for query in ({"error": "E: <b>"}, {"list": "yes"}):
        assert ("Trace: 4711 File <i>" in world.browser.get("/dead", topic=TOPIC, **query).words) == ("error" in query)
    shown = world.api.get(TOPIC, "4711")
    assert (shown["error"], shown["trace"]) == ("E: <b>", "File <i>\n")
    [listed] = world.api.done("GET", f"/v1/tasks?topic={TOPIC}")["tasks"]
    assert listed == {name: value for name, value in shown.items() if name != "trace"}


def test_one_that_is_being_delivered(world: World) -> None:
    world.api.put(TOPIC, "4711", delay="0s")
    world.clock.advance(30)
    world.lease()
    world.clock.advance(2_000)
    page = world.page()
    assert " started to deliver it 2s ago." in page.text
    assert [row[:2] + row[4:6] for row in deliveries(page)] == [["1", "running", "30 ms", ""]]
    assert page.verbs == ["cancel"]
    world.clock.advance(60 * MINUTE)
    page = world.page()
    assert "leased lease expired" in page.text
    assert " is lost: the lease expired" in page.text
    assert world.api.lease(TOPIC)[0]["attempt"] == 2
    page = world.page()
    assert [row[:2] for row in deliveries(page)] == [["2", "running"], ["1", "lost"]]
    assert "Delivery 1 was lost: its worker died or hung" in page.text


def test_who_moved_it_from_when_to_when(world: World) -> None:
    world.api.put(TOPIC, "4711", delay="5m")
    world.clock.advance(1_000)
    world.api.done("PATCH", f"/v1/topics/{TOPIC}/tasks/4711", {"delay": "10m"})
    world.clock.advance(1_000)
    world.api.done("POST", "/v1/fire", [{"topic": TOPIC, "key": "4711"}])
    page = world.page()
    scheduled, moved, due = (f"2030-03-17 17:{time}.000" for time in ("52:00", "57:01", "47:02"))
    assert changes(page) == [
        [due, "anonymous", "fire_now: moved", moved, due],
        ["2030-03-17 17:47:01.000", "anonymous", "reschedule: moved", scheduled, moved],
    ]
    assert "It was moved 2 times; before that it was due at 2030-03-17 17:52:00.000." in page.text
    world.api.done("DELETE", f"/v1/topics/{TOPIC}/tasks/4711")
    page = world.page()
    assert "cancelled It was cancelled, now" in page.text
    assert changes(page)[0][2:] == ["cancel: cancelled", "", ""]
    assert page.verbs == []


def test_a_new_life_remembers_the_old_one(world: World) -> None:
    world.api.dead(TOPIC, "4711")
    world.clock.advance(1_000)
    world.api.done("POST", "/v1/redrive", [{"topic": TOPIC, "key": "4711"}])
    page = world.page()
    assert "There were none yet." not in page.text
    assert "Deliveries of earlier lives" in page.text
    assert [row[:2] + row[7:8] for row in deliveries(page)] == [["1", "dead", "broken"]]
    assert changes(page)[0][2] == "redrive: redriven"


def test_one_that_nobody_takes(world: World) -> None:
    world.api.put(TOPIC, "4711", delay="0s")
    world.clock.advance(5_000)
    page = world.page()
    assert "It has been due for 5s and waits for a worker." in page.text
    assert "no worker had room for it, or no worker handles this topic" in page.text


def test_a_paused_topic_says_so(world: World) -> None:
    world.service.run(world.service.app.pause(TOPIC, who="anna"))
    world.api.put(TOPIC, "4711", delay="0s")
    world.clock.advance(1_000)
    page = world.page()
    assert "is held back because its topic is paused." in page.text
    assert "\u2068anna\u2069 paused the topic at " in page.text
    assert ": its tasks are not delivered until it is resumed." in page.text


def test_what_was_due_when_it_was_scheduled(calm: World) -> None:
    calm.schedule(None, at=as_datetime(START - 65_000))
    assert "It was scheduled 1m 5s after its requested time" in calm.page().text


# --- the part that is kept fresh


def test_the_part_that_is_asked_for_again(world: World) -> None:
    world.api.put(TOPIC, "4711", delay="5m")
    page = world.page()
    [live] = [one["data-live"] or "" for one in page.all("div", **{"data-every": "2000"})]
    part = world.browser("GET", live, headers={"hx-request": "true"})
    assert part.status == 200
    assert not part.all("html")
    assert "It changed after" not in part.text
    world.api.done("PATCH", f"/v1/topics/{TOPIC}/tasks/4711", {"delay": "10m"})
    part = world.browser("GET", live, headers={"hx-request": "true"})
    assert "It changed after this page was loaded" in part.text
    assert part.links["Reload the page"] == f"/tasks/{TOPIC}/4711"
    world.api.done("DELETE", f"/v1/topics/{TOPIC}/tasks/4711")
    assert [one for one in world.page().all("div", **{"data-every": "2000"}) if "data-over" in one]
    world.clock.advance(61 * MINUTE)
    store = world.service.app.store
    world.service.run(store.purge(now=world.clock.now(), limit=100))
    assert world.service.run(store.get([Ref(TOPIC, "4711")])) == [None]
    assert "It finished and was forgotten" in world.browser("GET", live, headers={"hx-request": "true"}).text
    page = world.page()
    assert page.status == 404
    assert "It never existed, or it finished and was forgotten." in page.text
    assert "This service remembers finished tasks" in page.text, "a worker may go by others"
    assert page.links["Search for this key in all topics"] == "/tasks?key=4711"


def test_what_came_of_a_change(calm: World) -> None:
    calm.schedule(None, delay="5m")
    for said, text in (
        ("moved", "It was moved."),
        ("fired", "It is due now"),
        ("cancelled", "It was cancelled: no delivery will start."),
        ("stale_token", "the task is no longer as you saw it"),
    ):
        assert text in calm.page(said=said).text
    assert "<i>" not in calm.page(said="<i>").text


@pytest.mark.parametrize(
    "path", ["/tasks/a%00b/1", "/tasks/a/%0a", "/tasks/bide:settings/session-key", "/task", "/task?topic=a"]
)
def test_names_that_cannot_be(calm: World, path: str) -> None:
    assert calm.browser.get(path).status == 422


def test_what_one_may_do(world: World) -> None:
    world.schedule(None, delay="5m")
    _, header = world.service.run(
        make(world.service.app, "ann", verbs=frozenset({Verb.READ, Verb.FIRE}), topics=("order.*",))
    )
    world.browser.log_in(header)
    assert world.page().verbs == ["fire"]


# --- payloads


def test_payloads(calm: World) -> None:
    calm.schedule({"a": [1, {"b": "<script>alert(1)</script>"}], "c": {}, "d": []})
    page = calm.page()
    assert "alert(1)" in page.text
    assert len(page.all("script")) == 3
    assert len(page.all("pre")) == 2
    calm.schedule(b"plain \x00 \xe2\x80\xae text")
    page = calm.page()
    assert "plain ␀ [RIGHT-TO-LEFT OVERRIDE] text" in page.text
    assert "It is text, but not JSON." in page.text
    calm.schedule(b"\xff\xfe\x00<b>")
    page = calm.page()
    assert "000000 ff fe 00 3c 62 3e ···<b>" in page.text
    calm.schedule(b"")
    assert "It is empty." in calm.page().text


@pytest.mark.parametrize(
    "data", [b"x" * 262_144, b"\xff" * 262_144, json.dumps(["é" * 50] * 800).encode(), b"[" * 200_000]
)
def test_large_payloads_are_cut_and_can_be_had_whole(calm: World, data: bytes) -> None:
    calm.schedule(data)
    page = calm.page()
    assert f"{len(data) / 1024:,.1f} KiB" in page.text
    assert len(page.body) < 6 * MOST_SHOWN
    whole = calm.browser.get(page.links["Download all of it"])
    assert whole.body == data
    assert whole.headers["content-type"] == "text/plain; charset=utf-8"
    assert whole.headers["content-disposition"].startswith('attachment; filename="payload-')
    assert whole.headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert whole.headers["x-content-type-options"] == "nosniff"


def test_headers_and_a_policy_of_its_own(calm: World) -> None:
    calm.schedule(None, headers={"trace": "<i>1</i>"}, retry=Ladder("15s", "3m"))
    page = calm.page()
    assert "<i>1</i>" in page.text
    assert "ladder Pauses 15s, 3m" in page.text


# --- how a payload is laid out


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_json_is_laid_out_and_means_the_same(value: object) -> None:
    text = msgspec.json.encode(value).decode()
    laid_out, cut = pretty(text, 10**9)
    assert not cut
    assert json.loads(laid_out) == json.loads(text)
    if json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")) == text:  # Python writes it so too
        assert laid_out == json.dumps(json.loads(text), indent=2, ensure_ascii=False)


def test_what_was_written_is_shown_as_it_was_written() -> None:
    assert pretty('{"a":1.10,"a":1E400,"b":"\\u003c"}', 100) == (
        '{\n  "a": 1.10,\n  "a": 1E400,\n  "b": "\\u003c"\n}',
        False,
    )


@given(st.binary(max_size=300))
def test_any_payload_can_be_shown(data: bytes) -> None:
    found = payload_view(data)
    assert found.size == len(data)
    assert (found.raw is None) is (found.dump is not None)
    if found.dump is not None:
        assert bytes.fromhex("".join(line[8:55] for line in found.dump.splitlines())) == data


@pytest.mark.parametrize(
    "data", [b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 900 + b"1" + b"}" * 900, b"[1," * 500 + b"1" + b"]" * 500]
)
def test_what_is_nested_deeply_stays_small(data: bytes) -> None:
    found = payload_view(data)
    assert len(found.pretty or "") + len(found.raw or "") <= 3 * MOST_SHOWN


def test_a_dump() -> None:
    assert dump(b"\x00A" * 9) == (
        "000000  00 41 00 41 00 41 00 41 00 41 00 41 00 41 00 41  ·A·A·A·A·A·A·A·A\n"
        "000010  00 41                                            ·A"
    )


HOUR = 3_600_000
PART = {"hx-request": "true"}


def look(browser: Browser, **query: Any) -> Page:
    """What a browser gets there."""
    page = browser.get("/timeline", **query)
    assert page.status == 200, page
    return page


def put(one: Running, topic: str, count: int, at: Millis) -> None:
    one.run(one.app.schedule_many([one.app.new(topic, None, at=as_datetime(at)) for _ in range(count)]))


def test_the_timeline_of_a_store_from_empty_to_a_peak(url: str, visit: Visit) -> None:
    with running(url) as service:
        browser = visit(service)
        empty = look(browser)
        assert "No task is waiting. Scheduled tasks appear here" in empty.text
        assert empty.chart is None

        now = service.app.clock.now()
        hour = now - now % HOUR
        peak = hour + 8 * HOUR
        put(service, "coupon.remind", 400, peak)
        put(service, "order.close", 12, peak)
        put(service, "order.close", 30, peak + 5 * MINUTE)
        put(service, "overdue", 3, now - HOUR)
        for number in range(10):
            put(service, f"small.{number}", 1, hour + 3 * HOUR)

        until = {"from": hour + 7 * HOUR, "until": hour + 9 * HOUR, "rate": 100}
        found = look(browser, **until)
        assert "412 tasks in this second: coupon.remind 400 · order.close 12" in found.text
        assert "At 100/s the last of them is 4.1s late. The backlog is gone by " in found.text
        assert "To be at most 1 s late it needs 412/s." in found.text
        assert "exactly" in found.text
        assert "Due now" not in found.text, "the range begins later"
        assert link(found, "Zoom in").startswith("/timeline?from=")
        assert "rate=100" in link(found, "Zoom in")
        assert "wake_from=" in link(found, "Show its tasks")
        assert instant_of(link(found, "Show its tasks"), "wake_from") == peak
        assert instant_of(link(found, "Show its tasks"), "wake_before") == peak + 1_000
        chart = found.chart
        assert [one["name"] for one in chart["series"]] == ["coupon.remind", "order.close"]
        assert sum(map(sum, (one["counts"] for one in chart["series"]))) == 442
        assert chart["peaks"][0] == peak
        assert len(chart["lows"]) == len(chart["labels"]) <= 120
        assert chart["keep"] == "rate=100"

        one = look(browser, **until, topic="order.close")
        assert [series["name"] for series in one.chart["series"]] == ["order.close"]
        assert sum(one.chart["series"][0]["counts"]) == 42
        assert {"overdue", "coupon.remind"} <= {found["value"] for found in one.all("option")}, (
            "all topics can be chosen"
        )

        month = look(browser, span="month", rate="5000")
        assert [series["name"] for series in month.chart["series"]][-1] == "others"
        assert len(month.chart["series"]) == 8
        assert "needs" not in month.text, "nobody has to wait for long"
        assert "others" in month.text
        hours = look(browser, span="hour")
        assert re.search(r"Due now 3 ", hours.text)
        assert "assumed, since no whole minute of the last day was spent on a backlog" in hours.text

        part = browser("GET", "/timeline?span=month", headers=PART)
        assert not part.all("html")
        assert b'data-live="/timeline/live?span=month"' in part.body
        live = browser("GET", "/timeline/live?span=month", headers=PART)
        assert b"timeline-part" not in live.body
        assert live.chart is not None


def link(page: Page, begins: str) -> str:
    """Where the first link whose words begin so leads."""
    return next(where for words, where in page.links.items() if words.startswith(begins))


def instant_of(where: str, name: str) -> Millis:
    return instant(parse_qs(urlsplit(where).query)[name][0])


@pytest.fixture(scope="module")
def one() -> Iterator[Running]:
    with running("memory:") as found:
        yield found


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("span=year", "span"), ("from=soon", "from"), ("until=2030-13-01", "until"), ("from=1h&until=30m", "until"),
        ("from=-2h&until=-90000000", "until"), ("rate=fast", "rate"), ("rate=0", "rate"), ("rate=-1", "rate"),
        ("topic=%00", "topic"), ("from=1h&until=9999-12-31", "until"), ("from=0s&until=4000d", "until"),
        ("from=99999999999999999999&until=1h", "from"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_its_name(browser: Browser, query: str, field: str) -> None:
    page = browser.get(f"/timeline?{query}")
    assert page.status == 422, page
    assert "A value is not accepted" in page.text
    assert f"{field}: " in page.text


def test_ranges_may_be_written_in_words_of_the_viewers_zone(one: Running, visit: Visit) -> None:
    browser = visit(one, zone="Europe/Berlin")
    page = look(browser, **{"from": "2030-06-01 08:00", "until": "2030-06-01 09:00"})
    assert "2030-06-01 08:00:00 to 2030-06-01 09:00:00, by 1m" in page.text
    ahead = look(browser, until="30m")
    assert b"data-live" not in ahead.body, "who has chosen a range keeps it"
    assert link(ahead, "Zoom out").startswith("/timeline?from=")


async def happened(app: Bide, planned: Millis, count: int) -> None:
    """So many deliveries begin now, and are done."""
    app.history.began("slow", [planned] * count, app.clock.now())
    for _ in range(count):
        app.history.ended("slow", OutcomeKind.DONE)
    await app.history.flush()


def test_the_past_stands_behind_it_and_says_how_fast_it_can_go(visit: Visit) -> None:
    clock = ManualClock(1_900_000_020_000)
    with running("memory:", clock=clock) as service:
        planned = clock.now() - 30_000
        for count in (600, 1):  # in the second minute some of the first one's are left
            service.run(happened(service.app, planned, count))
            clock.advance(MINUTE)
        put(service, "slow", 100, clock.now() + HOUR - MINUTE)
        browser = visit(service)
        page = look(browser, span="hour")
        past = page.chart["past"]
        assert (max(past["planned"]), max(past["done"])) == (601, 600)
        assert past["highs"][-1] == clock.now()
        assert "Assumed rate 10/s the fastest minute with a backlog in the last day: " in page.text
        assert "At 10/s the last of them is 10s late" in page.text
        assert "it goes back one day" in page.text
        other = look(browser, span="hour", topic="quick")
        assert "There is no task of the topic quick" in other.text
        assert "Assumed rate 1,000/s assumed" in other.text
        seconds = look(browser, **{"from": clock.now() - MINUTE, "until": clock.now() + MINUTE})
        assert "The past is recorded by the minute" in seconds.text


def test_a_name_of_others_is_harmless_in_the_chart_too(browser: Browser) -> None:
    hostile = "'\"><script>alert(1)</script>{{7*7}}&amp;\u202e</template>"
    browser.api.put(hostile, "k")
    page = look(browser, topic=hostile)
    assert [series["name"] for series in page.chart["series"]] == [inert_line(hostile, 60)]
    assert inert_line(hostile) in page.text
    assert "\u202e" not in page.text
