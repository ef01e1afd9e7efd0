"""Who may call: the form of tokens, patterns, what is kept, how long a revoked one lasts, and what nobody gets past."""

from __future__ import annotations

import asyncio
import fnmatch
import hmac
import logging
import pickle
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.waiting import elapse, in_virtual_time

from bide import BadInput, Bide, SetupError, StoreUnavailable
from bide.core.names import RESERVED_TOPIC
from bide.engine.settings_store import SettingsStore
from bide.service import access as access_module
from bide.service.access import (
    AGE,
    ALL_VERBS,
    DEFAULT_VERBS,
    FRESH,
    LONGEST_TOKEN,
    SOON,
    Access,
    Caller,
    Forbidden,
    ForeignOrigin,
    Token,
    Tokens,
    Unauthorized,
    Verb,
    check_pattern,
    check_start,
    hash_of,
    is_loopback,
    parse,
    verbs_of,
)
from bide.stores.memory import MemoryStore
from bide.testing.faults import FaultyStore
from bide.testing.virtual import VirtualClock, VirtualLoop

HOUR = 3_600_000


def tokens_of(app: Bide) -> Tokens:
    return Tokens(SettingsStore(app.store, app.clock))


async def make(
    app: Bide,
    name: str = "ann",
    verbs: frozenset[Verb] = DEFAULT_VERBS,
    topics: tuple[str, ...] = ("*",),
    expires_at: int | None = None,
) -> tuple[Token, str]:
    """A token and the header of whoever shows it."""
    token, text = await tokens_of(app).add(
        name, verbs=verbs, topics=topics, now=app.clock.now(), expires_at=expires_at, by="root@here"
    )
    return token, f"Bearer {text}"


# --- patterns

TOPIC = st.text(st.sampled_from("ab.*?[]!\\^$%\nаB"), max_size=12)
"""Few letters, and those that mean something elsewhere; one of them is Cyrillic."""


def by_fnmatch(topic: str, pattern: str) -> bool:
    """What `fnmatch.fnmatchcase` says, when nothing but * means anything to it."""
    return fnmatch.fnmatchcase(topic, re.sub(r"[\[?]", lambda found: f"[{found[0]}]", pattern))


@given(topic=TOPIC, pattern=TOPIC)
@example(topic="", pattern="")
@example(topic="ab", pattern="a*b*b")
@example(topic="aba", pattern="ab*ba")
def test_a_pattern_matches_as_fnmatch_does_with_a_star_alone(topic: str, pattern: str) -> None:
    assert Caller("ann", topics=(pattern,)).may(Verb.READ, topic) is by_fnmatch(topic, pattern)


def test_a_pattern_made_to_take_long_does_not() -> None:
    caller = Caller("ann", topics=("*a" * 99 + "*b",))
    calls = 0
    for _ in range(1_000):
        calls += caller.may(Verb.READ, "a" * 200)
    assert calls == 0, "a backtracking matcher would not have got here"


ORDERS = Caller("ann", verbs=frozenset({Verb.READ, Verb.CANCEL}), topics=("order.*", "mail", "caf\u00e9"))


@pytest.mark.parametrize(
    "topic", ["order.", "order.close", "order.a.b", "order.*", "mail", "order.\u202e", "caf\u00e9"]
)
def test_what_is_allowed(topic: str) -> None:
    ORDERS.check(Verb.READ, topic)


@pytest.mark.parametrize(
    "topic",
    [
        None,  # all topics
        "",
        "order",
        "orders.close",
        "xorder.close",
        " order.close",
        "Order.close",
        "ORDER.CLOSE",
        quote("order.close", safe="").replace("o", "%6F"),  # not decoded a second time
        "order%2Eclose",
        "order%2e",
        "оrder.close",  # a Cyrillic o
        "ｏrder.close",  # a full-width o
        "order․close",  # a one dot leader
        "order\u200b.close",
        "cafe\u0301",  # composed of two
        "mail\n",
        "mail ",
        "mail*",
        "*",
        "?ail",
        "[m]ail",
        "mail\x00",
        "x\norder.close",
        "../order.close",
        RESERVED_TOPIC,
    ],
)
def test_what_is_not(topic: str | None) -> None:
    assert not ORDERS.may(Verb.READ, topic)
    with pytest.raises(Forbidden) as caught:
        ORDERS.check_all(Verb.READ, ["mail", topic or ""])
    assert caught.value.status == 403
    assert "insufficient_scope" in caught.value.challenge
    assert caught.value.challenge.isascii()
    assert caught.value.challenge.isprintable()


@pytest.mark.parametrize("topics", [("*",), ("**",), ("a", "*")])
def test_who_may_do_all_still_has_no_settings_of_bide(topics: tuple[str, ...]) -> None:
    root = Caller("root", verbs=ALL_VERBS, topics=topics)
    for verb in Verb:
        root.check(verb, None)
        root.check_all(verb, ["a", "b"])
        with pytest.raises(Forbidden):
            root.check(verb, RESERVED_TOPIC)
        with pytest.raises(Forbidden):
            root.check_all(verb, ["a", RESERVED_TOPIC])
    assert not Caller("ann", topics=("bide:*", RESERVED_TOPIC)).may(Verb.READ, RESERVED_TOPIC)


def test_no_pattern_and_no_verb_is_nothing() -> None:
    assert not Caller("ann", topics=()).may(Verb.READ, "mail")
    assert not Caller("ann", topics=("",)).may(Verb.READ, None)
    assert not Caller("ann", verbs=frozenset()).may(Verb.READ, "mail")


@pytest.mark.parametrize("value", ["", "a\nb", "x" * 201, RESERVED_TOPIC, None, 7])
def test_bad_patterns(value: object) -> None:
    with pytest.raises(BadInput, match="topic"):
        check_pattern(value)


# --- the form of tokens


@given(st.text(max_size=80))
def test_what_is_no_token_is_none(text: str) -> None:
    assert parse(text) is None


@given(
    id=st.text(st.sampled_from("abcxyz0189"), min_size=8, max_size=8),
    secret=st.from_regex(r"[A-Za-z0-9_-]{43}", fullmatch=True),
    place=st.integers(0, LONGEST_TOKEN - 1),
    letter=st.sampled_from("\n\r\x00 =+/.é０Ａ"),
)
def test_a_token_has_exactly_one_form(id: str, secret: str, place: int, letter: str) -> None:
    text = f"bide_{id}_{secret}"
    assert parse(text) == (id, secret)
    for broken in (text + letter, letter + text, text[:place] + letter + text[place + 1 :], text[:place], text.upper()):
        assert parse(broken) is None


def test_verbs_by_name() -> None:
    assert verbs_of([]) == DEFAULT_VERBS == ALL_VERBS - {Verb.ADMIN}
    assert verbs_of(["read", "work"]) == {Verb.READ, Verb.WORK}
    assert verbs_of(["all"]) == ALL_VERBS
    with pytest.raises(BadInput, match=r"verb: 'READ' is not accepted; give all, or one of schedule"):
        verbs_of(["READ"])


# --- tokens at rest


async def test_the_secret_is_kept_nowhere(tmp_path: Path) -> None:
    async with Bide(f"sqlite:///{tmp_path}/tasks.db") as app:
        token, header = await make(app)
        secret = header.rpartition(f"{token.id}_")[2]
        assert len(secret) == 43
        assert token.hash == hash_of(secret)
        assert token.created_by == "root@here"
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())  # noqa: ASYNC240 - nothing else is at work
    assert token.hash.encode() in kept
    assert secret.encode() not in kept


async def test_bad_tokens_are_not_made() -> None:
    async with Bide("memory:") as app:
        tokens, now = tokens_of(app), app.clock.now()
        for field, given in (
            ("name", {"name": "a\nb"}),
            ("name", {"name": "anonymous"}),
            ("verb", {"verbs": frozenset()}),
            ("topic", {"topics": ()}),
            ("topic", {"topics": tuple(f"t{n}" for n in range(101))}),
            ("topic", {"topics": ("ok", RESERVED_TOPIC)}),
            ("expires", {"expires_at": now}),
        ):
            with pytest.raises(BadInput) as caught:
                await tokens.add(**{"name": "ann", "verbs": DEFAULT_VERBS, "topics": ("*",), "now": now, **given})  # type: ignore[arg-type]
            assert caught.value.field == field
        assert await tokens.all() == []


# --- who calls


async def refused(access: Access, header: str | None, match: str) -> Unauthorized:
    with pytest.raises(Unauthorized, match=match) as caught:
        await access.caller_of(header)
    assert caught.value.status == 401
    return caught.value


async def test_a_token_says_who_calls() -> None:
    async with Bide("memory:") as app:
        access = Access(app)
        token, header = await make(app, "ann", frozenset({Verb.READ}), ("order.*",))
        _, other = await make(app, "bob", ALL_VERBS)
        for form in (header, header.replace("Bearer", "bearer"), header.replace(" ", "   ")):
            assert await access.caller_of(form) == Caller("ann", frozenset({Verb.READ}), ("order.*",), token.id)
        assert (await access.caller_of(other)).name == "bob"
        assert (await access.caller_of_token(f" {header.split()[1]}\n")).name == "ann"


async def test_no_error_holds_what_was_sent() -> None:
    async with Bide("memory:") as app:
        access = Access(app)
        token, header = await make(app)
        text = header.split()[1]
        sent = [
            f"Bearer {text[:-1]}{'a' if text[-1] != 'a' else 'b'}", f"Bearer bide_zzzzzzzz_{text[-43:]}", "Bearer",
            f"Bearer {text}x", f"Bearer  {text[:30]}", f"Basic {text}", text, "", f"Bearer {text},{text}",
            f"Token {text}", f"Bearer\t{text}", f"Bearer {text.upper()}", "Bearer " + "x" * 100_000,
        ]  # fmt: skip
        for one in sent:
            error = await refused(access, one, "token")
            for shown in (str(error), repr(error), error.detail, error.challenge):
                assert text[-43:-1] not in shown
                assert token.id not in shown
                assert len(shown) < 300
            assert 'error="invalid_token"' in error.challenge
            assert pickle.loads(pickle.dumps(error)).challenge == error.challenge
        error = await refused(access, None, "a token is needed")
        assert error.challenge == 'Bearer realm="bide"', "RFC 6750, section 3.1: no error where nothing was sent"


async def test_secrets_are_compared_in_constant_time_also_for_an_unknown_id(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def digest(one: str, other: str) -> bool:
        compared.append((len(one), len(other)))
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(access_module, "hmac", type("Hmac", (), {"compare_digest": staticmethod(digest)}))
    async with Bide("memory:") as app:
        access = Access(app)
        _, header = await make(app)
        await access.caller_of(header)
        for wrong in (header[:-3] + "abc", "Bearer bide_zzzzzzzz_" + header[-43:]):
            compared.clear()
            await refused(access, wrong, "not known")
            assert compared == [(64, 64)]


P = ParamSpec("P")


def virtually(test: Callable[Concatenate[FaultyStore, Bide, P], Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """The test runs in virtual time; it is given a store with faults, and an app on it, before fixtures."""

    @wraps(test)
    async def told(loop: VirtualLoop, /, *fixtures: P.args, **named: P.kwargs) -> None:
        store = FaultyStore(MemoryStore())
        async with Bide(store, clock=VirtualClock(loop)) as app:
            await test(store, app, *fixtures, **named)

    return in_virtual_time(told, given=2)


@virtually
async def test_a_token_expires_by_the_stores_clock(store: FaultyStore, app: Bide) -> None:
    access = Access(app)
    token, header = await make(app, expires_at=app.clock.now() + HOUR)
    assert (await access.caller_of(header)).name == "ann"
    await elapse(3_599.999)
    assert (await access.caller_of(header)).name == "ann"
    await elapse(0.001)
    await refused(access, header, "expired")
    with pytest.raises(Unauthorized, match="expired"):
        await access.caller_by_id(token.id)
    await refused(access, header[:-3] + "abc", "not known")


@pytest.mark.parametrize("busy", [True, False])
@virtually
async def test_a_revoked_token_ends_within_five_seconds(store: FaultyStore, app: Bide, busy: bool) -> None:
    access = Access(app)
    token, header = await make(app)
    await access.caller_of(header)
    assert await tokens_of(app).revoke(token.id)
    assert not await tokens_of(app).revoke(token.id)
    if not busy:
        await elapse(FRESH)
        await refused(access, header, "not known")
        return
    for _ in range(round((AGE + 0.1) / 0.01)):
        with suppress(Unauthorized):
            await access.caller_of(header)
        await elapse(0.01)
    await refused(access, header, "not known")  # while callers come it is read again in the background
    with pytest.raises(Unauthorized, match="revoked"):
        await access.caller_by_id(token.id)


@virtually
async def test_a_new_token_counts_within_a_second(store: FaultyStore, app: Bide) -> None:
    access = Access(app)
    await make(app, "bob")
    await refused(access, "Bearer bide_zzzzzzzz_" + "x" * 43, "not known")
    _, header = await make(app)
    await refused(access, header, "not known")
    await elapse(SOON)
    assert (await access.caller_of(header)).name == "ann"


@virtually
async def test_guessing_costs_the_store_at_most_one_reading_a_second(store: FaultyStore, app: Bide) -> None:
    access = Access(app)
    _, header = await make(app)
    before = store.calls.get("find", 0)
    for number in range(2_000):
        await elapse(0.01)
        with pytest.raises(Unauthorized):
            await access.caller_of(f"Bearer bide_{number:08}_{'x' * 43}")
        assert (await access.caller_of(header)).name == "ann"
    assert store.calls.get("find", 0) - before <= 21, "2,000 guesses in 20 s"
    assert store.calls.get("get", 0) == 0


@virtually
async def test_a_crowd_waits_for_one_reading(store: FaultyStore, app: Bide) -> None:
    access = Access(app)
    _, header = await make(app)
    before = store.calls.get("find", 0)
    callers = await asyncio.gather(*(access.caller_of(header) for _ in range(500)))
    assert {caller.name for caller in callers} == {"ann"}
    assert store.calls.get("find", 0) - before == 1


def test_while_the_store_is_away_nobody_is_let_in_on_old_knowledge(caplog: pytest.LogCaptureFixture) -> None:
    async def story(store: FaultyStore, app: Bide) -> None:
        access = Access(app, anonymous=True)
        _, header = await make(app)
        await access.caller_of(header)
        store.fault = lambda point: StoreUnavailable("away") if point == "find:before" else None
        await elapse(AGE + 0.1)
        assert (await access.caller_of(header)).name == "ann"
        await elapse(FRESH - AGE)
        for sent in (header, None):
            with pytest.raises(StoreUnavailable):
                await access.caller_of(sent)
        store.fault = lambda _: None
        assert (await access.caller_of(header)).name == "ann"
        await access.close()

    with caplog.at_level(logging.WARNING, "bide.access"):
        virtually(story)()
    assert [record.getMessage() for record in caplog.records] == ["the tokens cannot be read: away"], "not one a call"


@virtually
async def test_a_caller_who_gives_up_does_not_end_the_reading_of_others(store: FaultyStore, app: Bide) -> None:
    access = Access(app)
    _, header = await make(app)
    first = asyncio.create_task(access.caller_of(header))
    second = asyncio.create_task(access.caller_of(header))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).name == "ann"
    assert first.cancelled()


async def test_two_services_share_the_tokens_of_a_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tasks.db"
    async with Bide(url) as one, Bide(url) as other:
        token, header = await make(one)
        assert (await Access(one).caller_of(header)).name == "ann"
        assert (await Access(other).caller_of(header)).name == "ann"
        assert await tokens_of(other).revoke(token.id)
        await refused(Access(one), header, "not known")
    async with Bide(f"sqlite:///{tmp_path}/another.db") as another:
        await refused(Access(another), header, "another store")


async def test_a_damaged_token_is_refused_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with Bide("memory:") as app:
        token, header = await make(app)
        await SettingsStore(app.store, app.clock).put(f"token:{token.id}", b"{nonsense")
        access = Access(app, anonymous=True)
        with caplog.at_level(logging.ERROR, "bide.access"):
            await refused(access, header, "not known")
            await refused(access, None, "a token is needed")
        assert [record.getMessage() for record in caplog.records] == [
            f"the token {token.id} cannot be read and is refused; revoke it and make another"
        ]
        assert await tokens_of(app).revoke(token.id)


# --- anonymous


@virtually
async def test_anonymous_is_everybody_until_there_is_a_token(store: FaultyStore, app: Bide) -> None:
    access, strict = Access(app, anonymous=True), Access(app)
    caller = await access.caller_of(None)
    assert (caller.name, caller.verbs, caller.topics) == ("anonymous", ALL_VERBS, ("*",))
    assert await access.anonymous_now()
    assert not await strict.anonymous_now()
    await refused(strict, None, "a token is needed")
    await refused(access, "Bearer wrong", "not a token")

    token, _ = await make(app, expires_at=app.clock.now() + HOUR)
    await elapse(FRESH)
    await refused(access, None, "a token is needed")
    await elapse(3_600)
    await refused(access, None, "a token is needed")
    assert not await access.anonymous_now(), "an expired token does not open the door"
    await tokens_of(app).revoke(token.id)
    await elapse(FRESH)
    assert await access.anonymous_now()


@pytest.mark.parametrize(
    ("headers", "let_in"),
    [
        ({}, True),
        ({"host": "127.0.0.1:8420"}, True),
        ({"host": "localhost:8420", "sec-fetch-site": "same-origin", "origin": "http://localhost:8420"}, True),
        ({"host": "localhost:8420", "sec-fetch-site": "cross-site"}, False),
        ({"host": "localhost:8420", "sec-fetch-site": "same-site"}, False),
        ({"host": "localhost:8420", "origin": "https://evil.example"}, False),
        ({"host": "localhost:8420", "origin": "null"}, False),
        ({"host": "localhost:8420", "x-forwarded-for": "203.0.113.9"}, False),
        ({"host": "localhost:8420", "via": "1.1 proxy"}, False),
        ({"host": "evil.example:8420", "sec-fetch-site": "same-origin", "origin": "http://evil.example:8420"}, False),
    ],
)
async def test_a_page_of_another_site_does_not_reach_loopback(headers: dict[str, str], let_in: bool) -> None:
    async with Bide("memory:") as app:
        access = Access(app, anonymous=True)

        async def call(access: Access, **more: str) -> str:
            sent = {name.encode(): value.encode() for name, value in {**headers, **more}.items()}
            return (await access.caller_of_request(sent)).name

        if let_in:
            assert await call(access) == "anonymous"
        else:
            with pytest.raises(ForeignOrigin):
                await call(access)
        if headers.get("host") == "evil.example:8420":
            assert await call(Access(app, anonymous=True, any_name=True)) == "anonymous"
        _, header = await make(app)
        assert await call(Access(app, anonymous=True), authorization=header) == "ann", (
            "no page of another's has a token"
        )
        with pytest.raises(Unauthorized):
            await call(Access(app, anonymous=True))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.255.0.1", True), ("::1", True), ("[::1]", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("", False), ("192.168.1.5", False),
        ("localhost.example.com", False), ("127.0.0.1.example.com", False), ("127.1", False), ("2130706433", False),
        ("0x7f.0.0.1", False), ("example.com", False), ("LOCALHOST", False), ("::ffff:8.8.8.8", False),
    ],
)  # fmt: skip
def test_what_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_a_service_that_others_can_reach_does_not_start_without_a_token() -> None:
    assert check_start("127.0.0.1", tokens=False)
    assert check_start("::1", tokens=True)
    for host in ("0.0.0.0", "192.168.1.5"):
        with pytest.raises(SetupError, match=r"bide token add NAME.*127\.0\.0\.1.*--insecure") as caught:
            check_start(host, tokens=False)
        assert host in str(caught.value)
        assert not check_start(host, tokens=True)
        assert check_start(host, tokens=False, insecure=True)
