"""The timeline over HTTP: what it says of what comes and what was, for whom, and what it refuses."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from tests.servers.keyspace import delete_keys
from tests.service.calling import Api, Running, running
from tests.service.test_access import make

from bide import Bide
from bide.core.instants import Millis, as_datetime, instant
from bide.core.records import Verdict
from bide.service.callers import Verb
from bide.service.console.inert import inert_line
from bide.service.console.phrases import translations
from bide.testing import ManualClock

HOUR, MINUTE = 3_600_000, 60_000
ENGLISH = {"accept-language": "en", "cookie": "bide_zone=Europe/Berlin"}
PART = {"hx-request": "true"}


@pytest.fixture(scope="module", params=["memory", "sqlite", "redis"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of one with nothing in it."""
    if request.param == "redis":
        server, own = request.getfixturevalue("redis_url"), "t" + secrets.token_hex(5)
        yield f"{server}?namespace={own}&shards=4"
        delete_keys(server, own)
    else:
        folder = tmp_path_factory.mktemp("timeline")
        yield "memory:" if request.param == "memory" else f"sqlite:///{folder}/tasks.db"


class Page(HTMLParser):
    """A page as a reader has it: its text, its links, and the numbers of its chart."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.texts: list[str] = []
        self.links: dict[str, str] = {}
        self.chart: Any = None
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._href: str | None = None
        self.feed(html)
        self.text = re.sub(r"\s+", " ", "".join(self.texts))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        if tag == "a":
            self._href = found.get("href")
        if found.get("data-chart"):
            self.chart = json.loads(found["data-chart"] or "")

    def handle_endtag(self, tag: str) -> None:
        if tag == "a":
            self._href = None

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._href is not None and data.strip():
            self.links.setdefault(data.strip(), self._href)


def look(api: Api, **query: Any) -> Page:
    """What a browser gets there."""
    reply = api("GET", f"/timeline?{urlencode(query)}", headers=ENGLISH)
    assert reply.status == 200, reply
    return Page(reply.body.decode())


async def put(app: Bide, topic: str, count: int, at: Millis) -> None:
    await app.schedule_many([app.new(topic, None, at=as_datetime(at)) for _ in range(count)])


def test_the_timeline_of_a_store_from_empty_to_a_peak(store: str) -> None:
    with running(store) as service:
        api = Api(service.url)
        empty = look(api)
        assert "No task waits. Schedule 1,000 of them, and they would show here" in empty.text
        assert empty.chart is None

        now = service.app.clock.now()
        hour = now - now % HOUR
        peak = hour + 8 * HOUR
        service.run(put(service.app, "coupon.remind", 400, peak))
        service.run(put(service.app, "order.close", 12, peak))
        service.run(put(service.app, "order.close", 30, peak + 5 * MINUTE))
        service.run(put(service.app, "overdue", 3, now - HOUR))
        for number in range(10):
            service.run(put(service.app, f"small.{number}", 1, hour + 3 * HOUR))

        day = look(api, topic="", rate="100")  # another look than that at the empty store, which is kept for a while
        until = {"from": hour + 7 * HOUR, "until": hour + 9 * HOUR, "rate": 100}
        found = look(api, **until)
        assert "412 tasks in this second: coupon.remind 400 · order.close 12" in found.text
        assert "At 100/s the last of them is 4.1s late. By " in found.text
        assert "To be at most 1 s late it needs 412/s." in found.text
        assert "exactly" in found.text
        assert "Due now" not in found.text, "the range begins later"
        assert found.links["Zoom in"].startswith("/timeline?from=")
        assert "rate=100" in found.links["Zoom in"]
        assert "wake_from=" in found.links["Show its tasks"]
        assert instant_of(found.links["Show its tasks"], "wake_from") == peak
        assert instant_of(found.links["Show its tasks"], "wake_before") == peak + 1_000
        chart = found.chart
        assert [one["name"] for one in chart["series"]] == ["coupon.remind", "order.close"]
        assert sum(map(sum, (one["counts"] for one in chart["series"]))) == 442
        assert chart["peaks"][0] == peak
        assert len(chart["lows"]) == len(chart["labels"]) <= 120
        assert chart["keep"] == "rate=100"
        assert day.text, "asked for again before it was worth it"

        one = look(api, **until, topic="order.close")
        assert [series["name"] for series in one.chart["series"]] == ["order.close"]
        assert sum(one.chart["series"][0]["counts"]) == 42
        assert {"overdue", "coupon.remind"} <= options(one), "all topics can be chosen"

        month = look(api, span="month", rate="5000")
        assert [series["name"] for series in month.chart["series"]][-1] == "others"
        assert len(month.chart["series"]) == 8
        assert "needs" not in month.text, "nobody has to wait for long"
        assert "others" in month.text
        hours = look(api, span="hour")
        assert re.search(r"Due now 3 ", hours.text)
        assert "assumed: no whole minute of the last day was spent on a backlog, which would tell it" in hours.text

        part = api("GET", "/timeline?span=month", headers={**ENGLISH, **PART}).body.decode()
        assert "<html" not in part
        assert 'data-live="/timeline/live?span=month"' in part
        live = api("GET", "/timeline/live?span=month", headers={**ENGLISH, **PART}).body.decode()
        assert "timeline-part" not in live
        assert Page(live).chart is not None
        api.close()


def options(page: Page) -> set[str | None]:
    return {found["value"] for tag, found in page.elements if tag == "option"}


def instant_of(link: str, name: str) -> Millis:
    return instant(parse_qs(urlsplit(link).query)[name][0])


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    with running("memory:") as found:
        yield found


@pytest.fixture
def api(small: Running) -> Iterator[Api]:
    found = Api(small.url)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("span=year", "span"), ("from=soon", "from"), ("until=2030-13-01", "until"), ("from=1h&until=30m", "until"),
        ("from=-2h&until=-90000000", "until"), ("rate=fast", "rate"), ("rate=0", "rate"), ("rate=-1", "rate"),
        ("topic=%00", "topic"), ("from=1h&until=9999-12-31", "until"), ("from=0s&until=4000d", "until"),
        ("from=99999999999999999999&until=1h", "from"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_by_its_name(api: Api, query: str, field: str) -> None:
    reply = api("GET", f"/timeline?{query}", headers=ENGLISH)
    assert reply.status == 422, reply
    page = Page(reply.body.decode())
    assert "A value is not accepted" in page.text
    assert f"{field}: " in page.text


def test_ranges_may_be_written_in_words_of_the_viewers_zone(api: Api) -> None:
    page = look(api, **{"from": "2030-06-01 08:00", "until": "2030-06-01 09:00"})
    assert "2030-06-01 08:00:00 to 2030-06-01 09:00:00, by 1m" in page.text
    ahead = look(api, until="30m")
    assert "data-live" not in ahead.html, "who has chosen a range keeps it"
    assert ahead.links["Zoom out"].startswith("/timeline?from=")


async def happened(app: Bide, planned: Millis, count: int) -> None:
    """So many deliveries begin now, and are done."""
    app.history.began("slow", [planned] * count, app.clock.now())
    for _ in range(count):
        app.history.ended("slow", Verdict.DONE)
    await app.history.flush()


def test_the_past_stands_behind_it_and_says_how_fast_it_can_go() -> None:
    clock = ManualClock(1_900_000_020_000)
    with running("memory:", clock=clock) as service:
        planned = clock.now() - 30_000
        for count in (600, 1):  # in the second minute some of the first one's are left
            service.run(happened(service.app, planned, count))
            clock.advance(MINUTE)
        service.run(put(service.app, "slow", 100, clock.now() + HOUR - MINUTE))
        api = Api(service.url)
        page = look(api, span="hour")
        past = page.chart["past"]
        assert (max(past["planned"]), max(past["done"])) == (601, 600)
        assert past["highs"][-1] == clock.now()
        assert "Reckoned with 10/s the fastest minute amid a backlog in the last day: " in page.text
        assert "At 10/s the last of them is 10s late" in page.text
        assert "it goes a day back" in page.text
        other = look(api, span="hour", topic="quick")
        assert "There is no task of the topic quick" in other.text
        assert "Reckoned with 1,000/s assumed" in other.text
        seconds = look(api, **{"from": clock.now() - MINUTE, "until": clock.now() + MINUTE})
        assert "The past is told by the minute" in seconds.text
        api.close()


def test_everybody_sees_their_own_topics_alone() -> None:
    with running("memory:") as service:
        for topic in ("shop.order", "bank.payment"):
            service.run(put(service.app, topic, 5, service.app.clock.now() + HOUR))
        _, whole = service.run(make(service.app, "whole"))
        _, shop = service.run(make(service.app, "shop", verbs=frozenset({Verb.READ}), topics=("shop.*",)))
        _, blind = service.run(make(service.app, "blind", verbs=frozenset({Verb.SCHEDULE})))
        api = Api(service.url)
        assert api("GET", "/timeline").status == 303, "to the login"
        seen = Page(in_session(api, whole, "/timeline")[1])
        assert sum(map(sum, (one["counts"] for one in seen.chart["series"]))) == 10
        status, html = in_session(api, shop, "/timeline")
        assert status == 200
        assert "bank" not in html
        seen = Page(html)
        assert [one["name"] for one in seen.chart["series"]] == ["shop.order"]
        assert sum(seen.chart["series"][0]["counts"]) == 5
        assert in_session(api, shop, "/timeline?topic=bank.payment")[0] == 403
        assert in_session(api, blind, "/timeline")[0] == 403
        api.close()


def in_session(api: Api, token: str, path: str) -> tuple[int, str]:
    """What whoever has this token gets there."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    begun = api("POST", "/login", body=urlencode({"token": token.removeprefix("Bearer ")}).encode(), headers=form)
    assert begun.status == 303, begun
    cookie = begun.headers["set-cookie"].partition(";")[0]
    reply = api("GET", path, headers={"cookie": cookie, "accept-language": "en"})
    return reply.status, reply.body.decode()


def test_names_of_others_change_nothing_of_the_page() -> None:
    hostile = "'\"><script>alert(1)</script>{{7*7}}&amp;\u202e</template>"
    shapes = []
    for topic in ("plain", hostile):
        with running("memory:") as service:
            service.run(put(service.app, topic, 5, service.app.clock.now() + HOUR))
            api = Api(service.url)
            for page in (look(api), look(api, topic=topic, span="hour")):
                shapes.append([(tag, sorted(found)) for tag, found in page.elements])
                [series] = page.chart["series"]
                assert series["name"] == inert_line(topic, 60)
                assert inert_line(topic) in page.text
                assert "\u202e" not in page.text
            api.close()
    assert shapes[:2] == shapes[2:]


def test_chinese(api: Api) -> None:
    reply = api("GET", "/timeline", headers={"accept-language": "zh-CN"})
    text = Page(reply.body.decode()).text
    assert "时间线" in text
    assert re.findall(r"[A-Za-z]+ [A-Za-z]+ [A-Za-z ]+", text) == [], "every sentence is told in Chinese"


def test_every_sentence_has_its_chinese() -> None:
    known = translations("zh")
    folder = files("bide.service.console") / "templates"
    for name in ("timeline", "timeline_part", "timeline_live"):
        text = (folder / f"{name}.html").read_text(encoding="utf-8")
        assert [one for one in re.findall(r"""\bt\(["'](.*?)["'][,)]""", text) if one not in known] == [], name
