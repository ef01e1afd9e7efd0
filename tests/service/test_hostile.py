"""Made-up cursors, tokens, cookies and second values of sessions: nothing of others' comes out of any door."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.service.calling import Api, Running, fresh_store, running
from tests.service.conftest import KEPT
from tests.service.console.browsing import Browser
from tests.service.test_access import make

from bide.core.records import Filter, Page
from bide.ports import remote
from bide.service.authz import ALL_VERBS, Verb
from bide.service.console.sessions import COOKIE

MINE, OTHERS = "b.mail", ("a.pay", "b", "b.mai", "b.mail2", "zz.pay", "bide:settings")
GROUP = "user-7"
LISTS = [{"topic": MINE, **more} for more in ({}, {"group": GROUP}, {"state": "waiting"}, {"state": "dead"})]


class Ground(NamedTuple):
    """An instance with tasks of several topics, and who may read one of them."""

    one: Running
    api: Api
    browser: Browser
    token: str
    csrf: str
    cursors: list[str]
    """Real ones, of lists that they may not read."""

    def find(self, where: dict[str, str], cursor: str) -> bytes:
        """As bide's own clients ask."""
        ask = remote.FindRequest(Filter(**where), Page(limit=50, cursor=cursor))  # type: ignore[arg-type]
        call = remote.Call("", 0, None, msgspec.Raw(msgspec.msgpack.encode(ask)))
        reply = self.api("POST", "/v1/store/find", body=msgspec.msgpack.encode(call))
        assert reply.status in (200, 422), reply
        return reply.body


@pytest.fixture(scope="module", params=["memory", "sqlite", "redis", "postgres"])
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    with fresh_store(request) as url, running(url, **KEPT) as one, ExitStack() as stack:

        async def fill() -> None:
            app = one.app
            tasks = [
                app.new(
                    topic,
                    f"SECRET {topic}" if topic != MINE else "mine",
                    key=f"{key}-of-{topic}",
                    group=GROUP,
                    delay="1h",
                )
                for topic in (MINE, *OTHERS[:-1])
                for key in "abc"
            ]
            await app.schedule_many(tasks)

        one.run(fill())
        _, root = one.run(make(one.app, "root", ALL_VERBS))
        _, header = one.run(make(one.app, "narrow", frozenset({Verb.READ, Verb.CANCEL}), (MINE,)))
        token = header.removeprefix("Bearer ")
        everything = stack.enter_context(closing(Api(one.url, root.removeprefix("Bearer "))))
        lists = [
            {"topic": topic, **more} for topic in OTHERS[:-1] for more in ({}, {"group": GROUP}, {"state": "waiting"})
        ]
        pages = [
            everything.done("GET", f"/v1/tasks?{urlencode({**one, 'limit': 1})}")
            for one in [*lists, {}, {"group": GROUP}]
        ]
        api = stack.enter_context(closing(Api(one.url, token)))
        browser = stack.enter_context(closing(Browser(one.url)))
        csrf = browser.log_in(token).csrf
        yield Ground(one, api, browser, token, csrf, [page["cursor"] for page in pages if page["cursor"]])


def encoded(value: object) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(value)).decode().rstrip("=")


ORDERS = st.sampled_from(["group", "name", "live", "ended", "topic", "due", "waiting", "dead", ""])
NAMES = st.sampled_from(["", *OTHERS, MINE, GROUP, "a-of-a.pay", "c-of-b.mail", "\0", "\uffff", "é"])
NUMBERS = st.sampled_from([0, 1, -1, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1])
SIMPLE = st.one_of(NAMES, NUMBERS, st.none(), st.floats(), st.binary(max_size=8))
PLACES = st.one_of(
    st.tuples(ORDERS, NAMES, NUMBERS, NUMBERS, NAMES), st.tuples(ORDERS, NAMES, NAMES, NUMBERS, NUMBERS),
    st.lists(SIMPLE, max_size=7), SIMPLE, st.dictionaries(NAMES, SIMPLE, max_size=3),
)  # fmt: skip


@st.composite
def cursors(draw: st.DrawFn, ground: Ground) -> str:
    real = st.sampled_from(ground.cursors)
    cursor: str = draw(st.one_of(PLACES.map(encoded), real, st.text(max_size=40), real.map(lambda one: one[:-2])))
    if draw(st.booleans()):
        return cursor
    return encoded((draw(NAMES), cursor, draw(st.none() | st.tuples(NAMES, NAMES))))  # as the console has them


def check(ground: Ground, body: bytes) -> None:
    """Nothing of what is others'."""
    for secret in (b"SECRET", *(f"-of-{topic}".encode() + end for topic in OTHERS for end in (b'"', b"<", b"\xa5"))):
        assert secret not in body, body[:2_000]


@given(data=st.data())
@settings(max_examples=150)
def test_no_cursor_leads_to_what_is_others(ground: Ground, data: st.DataObject) -> None:
    cursor, where = data.draw(cursors(ground)), data.draw(st.sampled_from(LISTS))
    asked = urlencode({**where, "cursor": cursor, "limit": 50}, errors="surrogatepass")
    reply = ground.api("GET", f"/v1/tasks?{asked}")
    assert reply.status in (200, 422), reply
    check(ground, reply.body)
    check(ground, ground.find({name: text for name, text in where.items() if name != "state"}, cursor))
    for path in (f"/tasks?{asked}", f"/tasks?{urlencode({'group': GROUP, 'cursor': cursor})}",
                 f"/dead?list=yes&{urlencode({'topic': MINE, 'cursor': cursor})}"):  # fmt: skip
        page = ground.browser.get(path)
        assert page.status in (200, 422), page
        check(ground, page.body)


HEADER = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=80)


def near(real: str) -> st.SearchStrategy[str]:
    """What somebody makes of a real value: a character changed, a part of it, more than it; or anything."""
    places = st.integers(0, len(real) - 1)
    changed = st.tuples(places, HEADER).map(lambda one: real[: one[0]] + one[1] + real[one[0] + 1 :])
    return st.one_of(HEADER, changed, places.map(lambda one: real[:one]), HEADER.map(lambda one: real + one))


@given(data=st.data())
@settings(max_examples=100)
def test_no_other_token_cookie_or_second_value_counts(ground: Ground, data: st.DataObject) -> None:
    with closing(Api(ground.one.url)) as stranger:
        text = data.draw(near(ground.token))
        if text.strip(" ") != ground.token:
            for scheme in ("Bearer ", "bearer  ", "", "Basic "):
                reply = stranger("GET", f"/v1/tasks?topic={MINE}", headers={"authorization": f"{scheme}{text}"})
                assert reply.status == 401, reply
                check(ground, reply.body)
        cookie = ground.browser.cookies[COOKIE]
        text = data.draw(near(cookie))
        if text.partition(";")[0].strip() != cookie:
            reply = stranger("GET", f"/tasks?topic={MINE}", headers={"cookie": f"{COOKIE}={text}"})
            assert reply.status in (303, 401), reply
            check(ground, reply.body)
        text = data.draw(near(ground.csrf))
        if text != ground.csrf:
            form: Any = {"csrf": text, "verb": "cancel", "scope": "chosen", "ref": f"{quote(MINE)}/a-of-{MINE}@1"}
            reply = stranger("POST", "/changes", body=urlencode(form).encode(), headers={
                "cookie": f"{COOKIE}={cookie}", "content-type": "application/x-www-form-urlencoded",
            })  # fmt: skip
            assert reply.status == 403, reply
