"""Sessions of the console, and how requests of other sites' pages are told from its own."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import pickle
from http.cookies import SimpleCookie
from pathlib import Path

import pytest
from tests.service.test_access import HOUR, make, tokens_of, virtually
from tests.waiting import elapse

from bide import Bide
from bide.core.errors import StoreFull
from bide.core.names import RESERVED_TOPICS
from bide.engine.settings_store import SettingsStore
from bide.service.access import (
    FRESH,
    SOON,
    Access,
    ForeignOrigin,
    Unauthorized,
    refuse_foreign_name,
    refuse_foreign_page,
)
from bide.service.sessions import (
    LASTS,
    CsrfMismatch,
    Session,
    Sessions,
    clear_cookie,
    cookie_name,
    cookie_of,
    set_cookie,
)
from bide.testing.faults import FaultyStore

HOST = "bide.example:8420"


def sessions_of(app: Bide, *, anonymous: bool = False) -> Sessions:
    return Sessions(app, Access(app, anonymous=anonymous))


def headers(host: str | None = HOST, origin: str | None = None, site: str | None = None) -> dict[bytes, bytes]:
    given = {b"host": host, b"origin": origin, b"sec-fetch-site": site}
    return {name: value.encode("latin-1") for name, value in given.items() if value is not None}


def changes(session: Session, csrf: str | None, site: str | None = "same-origin", origin: str | None = None) -> None:
    session.check_change(headers(origin=origin, site=site), csrf)


async def test_a_token_begins_a_session_that_its_cookie_finds_again() -> None:
    async with Bide("memory:") as app:
        sessions = sessions_of(app)
        token, header = await make(app)
        text = header.split()[1]
        begun = await sessions.begin(f" {text}\n")
        found = await sessions.of(begun.cookie)
        assert found == begun
        assert found.caller.name == "ann"
        changes(found, found.csrf)
        assert text[-43:] not in begun.cookie + begun.csrf
        assert token.hash not in begun.cookie + begun.csrf
        other = await sessions.begin(text)
        assert other.cookie != begun.cookie
        assert other.csrf != begun.csrf
        for wrong in ("", "wrong", text[:-1]):
            with pytest.raises(Unauthorized):
                await sessions.begin(wrong)


async def test_two_services_of_one_store_know_each_others_sessions(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tasks.db"
    async with Bide(url) as one, Bide(url) as other:
        _, header = await make(one)
        first, second = await asyncio.gather(
            sessions_of(one).begin(header.split()[1]), sessions_of(other).begin(header.split()[1])
        )
        assert await sessions_of(other).of(first.cookie) == first
        assert await sessions_of(one).of(second.cookie) == second
    async with Bide(f"sqlite:///{tmp_path}/another.db") as another:
        with pytest.raises(Unauthorized):
            await sessions_of(another).of(first.cookie)


@virtually
async def test_a_session_ends_by_itself_and_with_its_token(store: FaultyStore, app: Bide) -> None:
    sessions = sessions_of(app)
    token, header = await make(app)
    lasting = await sessions.begin(header.split()[1])
    await elapse(LASTS / 1000 - 0.001)
    assert (await sessions.of(lasting.cookie)).caller.name == "ann"
    await elapse(0.001)
    with pytest.raises(Unauthorized, match="has ended"):
        await sessions.of(lasting.cookie)

    again = await sessions.begin(header.split()[1])
    await tokens_of(app).revoke(token.id)
    await elapse(FRESH)
    with pytest.raises(Unauthorized, match="revoked"):
        await sessions.of(again.cookie)

    _, brief = await make(app, expires_at=app.clock.now() + HOUR)
    await elapse(SOON)
    short = await sessions.begin(brief.split()[1])
    await elapse(3_600)
    with pytest.raises(Unauthorized, match="expired"):
        await sessions.of(short.cookie)


async def test_a_cookie_cannot_be_changed_in_any_place() -> None:
    async with Bide("memory:") as app:
        sessions = sessions_of(app)
        token, header = await make(app)
        other, _ = await make(app, "root")
        session = await sessions.begin(header.split()[1])
        version, id, secret = (cookie := session.cookie).split(".")
        forged = [
            *(cookie[:place] + ("0" if cookie[place] != "0" else "1") + cookie[place + 1 :] for place in range(50)),
            f"{version}.{other.id}.{secret}", f"{version}.anonymous.{secret}", f"{version}.{id}.{session.csrf}",
            f"{version}.{id}.{'A' * 43}", f"{version}.{id}.", f"{version}.{id}", f"{version}.{id}.{secret[:-1]}",
            cookie + ".", cookie + "\n", cookie + "=", "", ".", "." * 4, "é" * 40, cookie * 2,
        ]  # fmt: skip
        for one in forged:
            with pytest.raises(Unauthorized, match=r"not a session of this service|log in with one|was revoked"):
                await sessions.of(one)
        with pytest.raises(Unauthorized) as caught:
            await sessions.of(None)
        assert caught.value.code is None
        assert id == token.id


async def test_whoever_reads_the_store_has_no_session() -> None:
    """Neither what is kept nor what can be reckoned from it is a cookie, of a person who is logged in or of a token."""
    async with Bide("memory:") as app:
        sessions = sessions_of(app)
        token, header = await make(app)
        session = await sessions.begin(header.split()[1])
        kept = [
            one for topic in RESERVED_TOPICS for one in (await SettingsStore(app.store, app.clock, topic).all()).items()
        ]
        assert len(kept) == 2
        readable = [part for name, value in kept for part in (name.encode(), value)]
        for part in readable:
            assert session.cookie[-43:].encode() not in part
            assert session.csrf.encode() not in part
            signed = f"1.{token.id}.{app.clock.now() + HOUR}.{'A' * 22}"
            made = hmac.digest(part, f"bide session\0{signed}".encode(), "sha256")
            guesses = [made, part, hashlib.sha256(part).digest()]
            for text in (base64.urlsafe_b64encode(one).decode()[:43] for one in guesses):
                for cookie in (f"{signed}.{text}", f"2.{token.id}.{text}"):
                    with pytest.raises(Unauthorized):
                        await sessions.of(cookie)


@virtually
async def test_leaving_ends_the_session_at_every_instance(store: FaultyStore, app: Bide) -> None:
    here, there = sessions_of(app), sessions_of(app)
    _, header = await make(app)
    mine, other = await here.begin(header.split()[1]), await here.begin(header.split()[1])
    assert await there.of(mine.cookie) == mine
    await here.end(mine.cookie)
    with pytest.raises(Unauthorized, match="log in again"):
        await here.of(mine.cookie)
    await elapse(FRESH)
    with pytest.raises(Unauthorized, match="log in again"):
        await there.of(mine.cookie)
    assert await there.of(other.cookie) == other, "each session by itself"
    for nothing in (None, "", "nonsense", mine.cookie, "2.anonymous." + "A" * 43, f"2.{'a' * 8}.{'A' * 43}"):
        await here.end(nothing)


@virtually
async def test_a_token_begins_no_flood_of_sessions(store: FaultyStore, app: Bide) -> None:
    sessions = sessions_of(app)
    _, header = await make(app)
    _, other = await make(app, "other")
    for _ in range(100):
        await sessions.begin(header.split()[1])
    with pytest.raises(Unauthorized, match="too many sessions"):
        await sessions.begin(header.split()[1])
    await sessions.begin(other.split()[1])
    await elapse(10)
    await sessions.begin(header.split()[1])


@virtually
async def test_sessions_cost_the_store_little_and_begin_where_it_is_full(store: FaultyStore, app: Bide) -> None:
    sessions = sessions_of(app)
    _, header = await make(app)
    store.fault = lambda point: StoreFull("full") if point == "add:before" else None
    session = await sessions.begin(header.split()[1])
    store.calls.clear()
    for _ in range(100):
        assert await sessions.of(session.cookie) == session
        with pytest.raises(Unauthorized):
            await sessions.of(f"2.{'a' * 8}.{'A' * 43}")
    assert not store.calls
    await elapse(LASTS / 1000 - 1)
    assert await sessions.of(session.cookie) == session
    await elapse(1)
    with pytest.raises(Unauthorized):
        await sessions.of(session.cookie)


async def test_what_changes_something_must_come_from_a_page_of_the_session() -> None:
    async with Bide("memory:") as app:
        sessions = sessions_of(app)
        _, header = await make(app)
        session = await sessions.begin(header.split()[1])
        another = await sessions.begin(header.split()[1])
        for csrf in (None, "", another.csrf, session.csrf[:-1], session.csrf + "=", session.cookie, "é", "\udc80"):
            with pytest.raises(CsrfMismatch) as caught:
                changes(session, csrf)
            assert caught.value.status == 403
            assert session.csrf not in str(caught.value)
        for site in ("cross-site", "same-site", "", "SAME-ORIGIN", "same-origin, cross-site"):
            with pytest.raises(ForeignOrigin):
                changes(session, session.csrf, site=site)
        with pytest.raises(ForeignOrigin):
            changes(session, session.csrf, site=None, origin="https://evil.example")
        changes(session, session.csrf, site=None, origin=f"https://{HOST}")
        changes(session, session.csrf, site=None)
        for error in (CsrfMismatch("why"), ForeignOrigin("why")):
            assert str(pickle.loads(pickle.dumps(error))) == "why"


@virtually
async def test_anonymous_sessions_end_when_there_is_a_token(store: FaultyStore, app: Bide) -> None:
    sessions = sessions_of(app, anonymous=True)
    session = await sessions.begin_anonymous()
    assert (await sessions.of(session.cookie)).caller.name == "anonymous"
    assert "Secure" not in set_cookie(session, app.clock.now(), host=HOST), "it gives nothing, and forms need it"
    with pytest.raises(Unauthorized):
        await sessions_of(app).of(session.cookie)
    await make(app)
    await elapse(FRESH)
    with pytest.raises(Unauthorized, match="a token is needed now"):
        await sessions.of(session.cookie)
    with pytest.raises(Unauthorized, match="a token is needed"):
        await sessions.begin_anonymous()


# --- cookies


@pytest.mark.parametrize(
    ("host", "secure"),
    [
        (HOST, True), (None, True), ("localhost.evil.example", True), ("10.0.0.5:8420", True), ("", True),
        ("127.0.0.1:8420", False), ("localhost:8420", False), ("[::1]:8420", False), ("[::1]", False),
    ],
)  # fmt: skip
async def test_the_cookie_goes_to_this_site_alone_and_not_in_the_clear(host: str | None, secure: bool) -> None:
    async with Bide("memory:") as app:
        _, header = await make(app)
        session = await sessions_of(app).begin(header.split()[1])
        now = app.clock.now()
        for text, value, age in (
            (set_cookie(session, now, host=host), session.cookie, (session.expires_at - now) // 1000),
            (clear_cookie(host=host), "", 0),
        ):
            morsel = SimpleCookie(text)[cookie_name(host)]
            assert (morsel.value, int(morsel["max-age"]), morsel["path"]) == (value, age, "/")
            assert (bool(morsel["httponly"]), morsel["samesite"]) == (True, "Strict")
            assert bool(morsel["secure"]) is secure
            assert not morsel["domain"]


@pytest.mark.parametrize(
    ("header", "cookie"),
    [
        (None, None), ("", None), ("a=b", None), ("bide_session=x", "x"), ("a=b; bide_session=x;c=d", "x"),
        ("bide_session=x; bide_session=x", "x"), ("bide_session=x; bide_session=y", None),
        ("Bide_session=x", None), ("xbide_session=y", None), ("bide_session", ""), ("x" * 20_000, None),
    ],
)  # fmt: skip
def test_the_cookie_among_others(header: str | None, cookie: str | None) -> None:
    assert cookie_of(header, host="bide.example") == cookie


def test_services_on_one_host_have_a_cookie_each() -> None:
    header = "bide_session_8420=a; bide_session_8421=b; bide_session=c"
    hosts = ["localhost:8420", "[::1]:8421", "localhost", "[::1]", "localhost:8422", None]
    assert [cookie_of(header, host=host) for host in hosts] == ["a", "b", "c", "c", None, "c"]


# --- pages of other sites


@pytest.mark.parametrize(
    ("host", "origin", "site", "ours"),
    [
        (HOST, None, None, True),  # no browser
        (HOST, None, "same-origin", True),
        (HOST, None, "none", True),
        (HOST, "https://evil.example", "same-origin", True),  # a proxy that sends its own Host: the browser knows best
        (HOST, None, "same-site", False),
        (HOST, None, "cross-site", False),
        (HOST, None, "nonsense", False),
        (HOST, f"http://{HOST}", None, True),
        (HOST, f"http://{HOST.upper()}", None, True),
        ("bide.example", "https://bide.example", None, True),
        ("bide.example", "https://bide.example:443", None, True),
        ("bide.example:443", "https://bide.example", None, True),
        ("bide.example:80", "https://bide.example", None, False),
        (HOST, "https://bide.example", None, False),
        (HOST, "null", None, False),
        (HOST, "", None, False),
        (HOST, f"https://{HOST}@evil.example", None, False),
        (HOST, f"https://evil.example/{HOST}", None, False),
        (HOST, f"https://{HOST}.evil.example", None, False),
        (None, f"https://{HOST}", None, False),
        ("a b", "https://a b", None, False),
    ],
)
def test_a_page_of_another_site_is_told(host: str | None, origin: str | None, site: str | None, ours: bool) -> None:
    if ours:
        refuse_foreign_page(headers(host, origin, site))
    else:
        with pytest.raises(ForeignOrigin):
            refuse_foreign_page(headers(host, origin, site))


@pytest.mark.parametrize(
    "host",
    [None, "localhost", "localhost:8420", "LOCALHOST.", "app.localhost:1", "127.0.0.1:8420", "127.9.9.9", "[::1]:8420"],
)
def test_names_of_this_machine(host: str | None) -> None:
    refuse_foreign_name(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8420", "127.0.0.1.evil.example", "localhost.evil.example", "notlocalhost",
        "0.0.0.0:8420", "[::]", "10.0.0.5", "evil.example@127.0.0.1", "127.0.0.1@evil.example", "", ":8420", "127.1",
        "2130706433", "[::1].evil.example", "ⓛocalhost", "localhost\u200b",
    ],
)  # fmt: skip
def test_a_rebound_name_is_told(host: str) -> None:
    with pytest.raises(ForeignOrigin, match="not by that name"):
        refuse_foreign_name(host)
