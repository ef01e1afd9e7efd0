"""What goes on for long ends with its token: streams, leases that wait, changes of many tasks in the background."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from tests.service.calling import Api, Reply, Running, at, running
from tests.service.console.browsing import Browser
from tests.service.test_access import make, tokens_of
from tests.waiting import PATIENCE, wait_until

from bide import Bide
from bide.core.instants import Millis
from bide.core.records import State
from bide.ports import remote
from bide.service import access, streaming
from bide.service.authz import ALL_VERBS, Token, Verb
from bide.testing import ManualClock

START: Millis = 1_900_000_000_000
TOPIC = "order.close"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def one(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """An instance that forgets soon what it knows of tokens."""
    monkeypatch.setattr(access, "FRESH", 0.1)
    monkeypatch.setattr(access, "SOON", 0.0)
    monkeypatch.setattr(streaming, "_EVERY", 0.01)
    with running("memory:", clock=clock) as found:
        yield found


@pytest.fixture
def root(one: Running) -> Iterator[Api]:
    """Somebody who may do everything, and goes on."""
    _, header = one.run(make(one.app, "root", ALL_VERBS))
    with closing(Api(one.url, header.removeprefix("Bearer "))) as api:
        yield api


def given(one: Running, *verbs: Verb, **more: Any) -> tuple[Token, str]:
    token, header = one.run(make(one.app, "shop", frozenset(verbs), **more))
    return token, header.removeprefix("Bearer ")


def revoke(one: Running, token: Token) -> None:
    async def work(app: Bide) -> None:
        assert await tokens_of(app).revoke(token.id)

    one.run(work(one.app))


@contextmanager
def opened(one: Running, method: str, path: str, token: str) -> Iterator[http.client.HTTPResponse]:
    topics = msgspec.Raw(msgspec.msgpack.encode([TOPIC]))
    body = msgspec.msgpack.encode(remote.Call("", 0, None, topics)) if method == "POST" else None
    with closing(http.client.HTTPConnection(urlsplit(one.url).netloc, timeout=PATIENCE)) as connection:
        connection.request(method, path, body, {"authorization": f"Bearer {token}"})
        with connection.getresponse() as answer:
            assert answer.status == 200
            yield answer


@pytest.mark.parametrize(
    ("method", "path", "verb"), [("GET", "/v1/events", Verb.EVENTS), ("POST", "/v1/store/listen", Verb.WORK)]
)
def test_a_stream_that_is_never_silent_ends_with_its_token(
    one: Running, root: Api, method: str, path: str, verb: Verb
) -> None:
    root.put(TOPIC, "42")
    token, text = given(one, verb)
    delay = 10_000

    def told() -> bytes:
        """What the stream says of a change that is made now; nothing: it has ended."""
        nonlocal delay
        delay -= 1
        root.done("PATCH", at(TOPIC, "42"), {"delay": f"{delay}s"})
        return answer.readline()

    with opened(one, method, path, text) as answer:
        assert told()
        revoke(one, token)
        wait_until(lambda: not told(), "the end of the stream")


def waiting(one: Running, text: str) -> tuple[threading.Thread, list[Reply]]:
    """A lease that waits in the long poll."""
    replies: list[Reply] = []

    def ask() -> None:
        with closing(Api(one.url, text)) as api:
            replies.append(api("POST", "/v1/lease", {"topics": {TOPIC: 1}, "wait": "60s", "lease_for": "1h"}))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: one.serving._long_poll.waiting == 1, "the lease to wait")
    return thread, replies


def test_a_lease_that_waits_ends_with_its_token(one: Running, root: Api) -> None:
    token, text = given(one, Verb.WORK)
    thread, replies = waiting(one, text)
    revoke(one, token)
    with closing(Api(one.url, text)) as api:
        wait_until(lambda: api("POST", "/v1/lease", {"topics": {TOPIC: 1}}).status == 401, "the token to be refused")
    root.put(TOPIC, "42", delay="0s", payload="secret")
    thread.join(PATIENCE)
    assert [reply.status for reply in replies] == [401]
    task = root.get(TOPIC, "42")
    assert (task["state"], task["attempt"]) == ("waiting", 0)


def test_what_is_handed_out_too_late_is_given_back(one: Running, root: Api, clock: ManualClock) -> None:
    """The token has expired, and nobody has asked since."""
    _, text = given(one, Verb.WORK, expires_at=START + 1_000)
    access.FRESH = 60.0
    thread, replies = waiting(one, text)
    clock.advance(1_000)
    root.put(TOPIC, "42", delay="0s")
    thread.join(PATIENCE)
    assert [reply.status for reply in replies] == [401]
    wait_until(lambda: root.get(TOPIC, "42")["state"] == "waiting", "the task to be given back")
    assert root.get(TOPIC, "42")["attempt"] == 0


def test_a_change_in_the_background_ends_with_its_token(one: Running, root: Api) -> None:
    for key in range(60):
        root.put(TOPIC, f"k{key}", delay="2h")
    token, text = given(one, Verb.READ, Verb.CANCEL)
    other, same_name = given(one, Verb.READ, topics=("mail.*",))
    with closing(Browser(one.url)) as ann, closing(Browser(one.url)) as bo:
        ann.log_in(text)
        ann.send([("verb", "cancel"), ("scope", "matching"), ("topic", TOPIC)])
        ann.press("Cancel: 60 tasks", pace="10")
        bo.log_in(same_name)
        assert bo.get(ann.where).status == 403, "a name is not who they are"
        csrf = bo.get("/changes").csrf
        assert bo.post(f"{ann.where}/stop", {"csrf": csrf}).status == 403
        revoke(one, token)
        ann.log_in(given(one, Verb.READ)[1], ann.where)
        wait_until(lambda: "its token was revoked" in ann.open(ann.where).words, "the end of the change")
    left = one.run(one.app.tally()).number(TOPIC, State.WAITING)
    assert 0 < left < 60
    assert other.name == token.name == "shop"
