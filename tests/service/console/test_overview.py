"""The overview page: what it shows to whom, on real stores, and that it stays cheap and harmless."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC
from pathlib import Path
from urllib.parse import urlencode

import pytest
from msgspec.structs import replace
from tests.service.calling import Api, Running, running
from tests.service.console.forms import HOSTILE, Parsed
from tests.service.test_access import make

from bide.engine import overview_looks
from bide.engine.history import Past, bucket_of
from bide.engine.pauses import Pauses
from bide.engine.presence import Channel
from bide.engine.throughput import Flow
from bide.ports import COUNTED
from bide.service.callers import Verb
from bide.service.console.overview_page import bars, grade, said, said_of_wake_ups
from bide.service.console.phrases import Phrases, translations
from bide.service.health import Level
from bide.stores.memory import MemoryStore
from bide.testing.faults import FaultyStore


def shown(api: Api, path: str = "/", **headers: str) -> Parsed:
    reply = api("GET", path, headers=headers)
    assert reply.status == 200, reply
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    return Parsed(reply.body.decode())


def log_in(api: Api, token: str) -> dict[str, str]:
    """The headers of a session."""
    body = urlencode({"token": token}).encode()
    reply = api(
        "POST", "/login", body=body, headers={"content-type": "application/x-www-form-urlencoded"}
    )  # fmt: skip
    assert reply.status == 303, reply
    return {"cookie": reply.headers["set-cookie"].partition(";")[0]}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look is not put off."""
    monkeypatch.setattr(overview_looks, "EVERY", 0.0)


@pytest.fixture(params=["memory", "sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        server, name = request.getfixturevalue("redis_url"), request.getfixturevalue("redis_namespace")
        return f"{server}?namespace={name}&shards=4"
    return "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/tasks.db"


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Running]:
    with running(f"sqlite:///{tmp_path}/tasks.db") as found:
        yield found


@contextmanager
def calling(one: Running, token: str | None = None) -> Iterator[Api]:
    api = Api(one.url, token)
    try:
        yield api
    finally:
        api.close()


@pytest.fixture
def api(one: Running) -> Iterator[Api]:
    with calling(one) as found:
        yield found


def test_an_empty_store_says_what_to_do_first(url: str) -> None:
    with running(url) as one, calling(one) as api:
        page = shown(api)
        assert "Nothing is here yet" in page.text
        assert f"curl -X PUT {one.url}/v1/topics/hello/tasks/1 " in page.text
        [command] = re.findall(r"-d '(\{.*?\})'", page.text)
        reply = api("PUT", "/v1/topics/hello/tasks/1", body=command.encode())
        assert reply.status == 201, reply
        page = shown(api)
        assert "Nothing is here yet" not in page.text
        assert "Pending 1 " in page.text


def test_what_it_shows(url: str) -> None:
    with running(url) as one, calling(one) as api:
        api.dead("broken", "1")
        for key in ("1", "2", "3"):
            api.put("held", key, delay="0s")
        [held] = api.lease("held", 1)
        api.put("held", "3", delay="0s")  # of a topic that somebody has asked for
        api.put("later", "1", delay="1h")
        one.run(Pauses(one.app.store, one.app.clock).pause("held", who="anna"))
        one.run(one.app.history.flush())
        page = shown(api)
        assert "Pending 3 Due now 2 the oldest for" in page.text
        assert "Leased 1 " in page.text
        assert "Dead 1 given up on" in page.text
        assert re.search(r"Lateness, p99 [0-9.]+ ?m?s", page.text)
        assert "Held back by a pause held : 2 due; paused since" in page.text
        assert ", anna" in page.text
        assert f"anonymous@{one.serving.instance} a consumer, or a worker that has gone held 1 0" in page.text
        assert "ok: store it answers" in page.text
        assert "wake-ups last heard" in page.text or url.startswith("redis"), "there one's own are no tidings"
        assert {"/tasks?state=waiting", "/tasks?state=due", "/tasks?state=leased", "/dead", "/topics/held"} <= set(
            page.links
        )
        part = shown(api, "/overview/live")
        assert "html" not in part.tags
        assert "Due now 2" in part.text
        assert api.settle(held, "done")


def test_it_needs_neither_inline_script_nor_style(one: Running, api: Api) -> None:
    api.put("a", "1", delay="0s")
    api.lease("a")
    one.run(one.app.history.flush())
    page = shown(api)
    assert "svg" in page.tags
    assert "style" not in page.tags
    assert not {name for name in page.attributes if name == "style" or name.startswith(("on", "hx-on"))}


def test_texts_of_others_are_inert(one: Running, api: Api) -> None:
    for key in ("1", "2"):
        api.put(HOSTILE, key, delay="0s")
    api.lease(HOSTILE)
    one.run(Pauses(one.app.store, one.app.clock).pause(HOSTILE, who=HOSTILE))
    one.run(_announce(one, HOSTILE))
    page = shown(api)
    assert "img" not in page.tags
    assert "onerror" not in page.attributes
    assert "{{7*7}}" in page.text
    assert "\u202e" not in page.text
    assert page.text.count("[RIGHT-TO-LEFT OVERRIDE]") >= 4


async def _announce(one: Running, name: str) -> None:
    now = one.app.clock.now()
    await one.app.store.announce(f"worker of {name}", [name], now + 60_000, now=now)  # type: ignore[attr-defined]


def test_everybody_sees_what_they_may(one: Running) -> None:
    some, entire, blind = (
        one.run(make(one.app, name, verbs, topics))[1].split()[1]
        for name, verbs, topics in (
            ("some", frozenset(Verb), ("mine.*",)), ("all", frozenset(Verb), ("*",)),
            ("blind", frozenset({Verb.SCHEDULE}), ("*",)),
        )
    )  # fmt: skip
    with calling(one, entire) as api:
        for topic, number in (("mine.a", 2), ("yours", 3)):
            for key in range(number):
                api.put(topic, str(key), delay="0s")
            api.lease(topic)
            one.run(Pauses(one.app.store, one.app.clock).pause(topic))
            one.run(_announce(one, topic))
        one.run(one.app.history.flush())
        page = shown(api, **log_in(api, entire))
        assert "Pending 3 " in page.text
        assert "Scheduled / s" in page.text
        assert "yours" in page.text
        page = shown(api, **log_in(api, some))
        assert "Pending 1 Due now 1 " in page.text
        assert "Leased 1 " in page.text
        assert "yours" not in page.text
        assert "Scheduled / s" not in page.text
        assert "Shown is what you may see: some topics." in page.text
        for path in ("/", "/overview/live"):
            reply = api("GET", path, headers=log_in(api, blind))
            assert reply.status == 403, reply
            assert b"read" in reply.body
            assert b"yours" not in reply.body


def test_in_chinese(api: Api) -> None:
    api.dead("a", "1")
    page = shown(api, **{"accept-language": "zh-CN,zh;q=0.9"})
    assert "死信 1 " in page.text
    assert "正常: 存储 有回应" in page.text
    assert "谁在工作" in page.text


def test_more_than_a_store_counts_is_counted_all_the_same(one: Running, api: Api) -> None:
    one.run(_fill(one, COUNTED + 500))
    page = shown(api)
    for _ in range(20):
        if f"Pending {COUNTED + 500:,}" in page.text:
            break
        page = shown(api, "/overview/live")
    assert f"Pending {COUNTED + 500:,}" in page.text
    assert "10,000+" not in page.text


async def _fill(one: Running, number: int) -> None:
    await one.app.schedule_many([one.app.new("big", None, delay="1h") for _ in range(number)])


def test_a_store_that_fails_or_hangs_is_a_page() -> None:
    from bide import StoreUnavailable

    store = FaultyStore(MemoryStore())
    with running(store) as one, calling(one) as api:
        assert "Nothing is here yet" in shown(api).text
        store.fault = lambda point: StoreUnavailable("away") if point == "tally:before" else None
        reply = api("GET", "/")
        assert reply.status == 503
        assert b"The store is away" in reply.body
        reply = api("GET", "/overview/live", headers={"hx-request": "true"})
        assert (reply.status, b"The store is away" in reply.body) == (200, True), "a part says it in its place"
        store.fault = lambda _: None
        assert "Nothing is here yet" in shown(api).text


def test_bars() -> None:
    assert bars([]) == bars([0] * 60) == ""
    assert bars([0] * 58 + [1, 1_000]) == "M232 40v-1h3v1zM236 40v-40h3v40z"


class Says:
    """A visit, as far as words go: tells which sentence was asked for."""

    def say(self, english: str, **values: object) -> str:
        assert english in translations("zh"), english
        return "* " + english.format(**values)


@pytest.mark.parametrize(
    "what",
    [
        "it answers", "version 3", "version 2, and 3 is wanted: bide migrate", "no answer within 2 s",
        "version 4, newer than this program, which knows 3", "the store cannot be asked (StoreUnavailable)",
        "the check itself failed (KeyError)", "2 of 4 parts do not answer", "not open yet, or closed",
        "within a second of the store's", "this machine's clock is 5.1 s ahead of the store's",
        "this machine's clock is 5.1 s behind the store's",
    ],
)  # fmt: skip
def test_what_the_checks_say_is_known_in_every_language(what: str) -> None:
    assert said(Says(), what) == f"* {what}"  # type: ignore[arg-type]
    assert said(Says(), f"{what}, and more") in (f"* {what}, and more", f"{what}, and more")  # type: ignore[arg-type]


def test_what_is_said_of_wake_ups() -> None:
    class Viewer(Says):
        phrases = Phrases("en", "UTC", UTC, 0)

    def words(**changes: object) -> tuple[Level, str]:
        well = Channel(notifies=True, loops=2, heard=3, heard_ago=4.2, missed=0, missed_lately=False)
        return said_of_wake_ups(Viewer(), replace(well, **changes))  # type: ignore[arg-type]

    assert words() == (Level.OK, "* last heard 4.2s ago")
    assert words(missed=2) == (Level.OK, "* last heard 4.2s ago · * 2 missed since the start")
    assert words(missed=2, missed_lately=True)[0] is Level.WARNING
    assert words(heard_ago=None) == (Level.OK, "* none heard here so far")
    assert words(notifies=False) == (Level.OK, "* this store cannot tell of them: who waits asks again and again")


@pytest.mark.parametrize(("late", "expected"), [(None, ""), (0, "good"), (95, "good"), (120, "warn"), (2_000, "bad")])
def test_how_late_is_bad(late: int | None, expected: str) -> None:
    past = Past() if late is None else Past(begun=1, late={bucket_of(late): 1})
    assert grade(Flow(60_000, past, 0)) == expected
    assert grade(None) == ""


def test_every_sentence_of_the_templates_is_translated() -> None:
    import bide.service.console as console

    folder = Path(console.__file__).parent
    known = translations("zh")
    for name in ("overview.html", "overview_live.html"):
        text = (folder / "templates" / name).read_text(encoding="utf-8")
        for found in re.findall(r"""\bt\((?:"([^"]+)"|'([^']+)')""", text):
            sentence = found[0] or found[1]
            assert sentence in known, sentence
            assert set(re.findall(r"\{\w+\}", sentence)) == set(re.findall(r"\{\w+\}", known[sentence])), sentence
