"""URLs of stores, and what is read from one.

Two readings of damage are right: it is told as damage, or the task is read with what the bytes now say, and whatever is
done with a task goes on.
"""

from __future__ import annotations

import json
import logging
import random
import re
from contextlib import suppress
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote, urlsplit

import pytest
from asyncpg import connect_utils, exceptions
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from msgspec import DecodeError
from msgspec.structs import replace
from tests.fuzz.cases import NUMBERS, changed, damaged, fuzz, mostly, near_bytes, refusals
from tests.fuzz.conftest import Loop
from tests.fuzz.tasks import SOUND, made, records, worked_on

from bide.core.errors import BadInput, BadPayload, BideError
from bide.core.instants import LAST_INSTANT, LONGEST, At
from bide.core.names import new_id
from bide.core.options import decode_options, encode_options
from bide.core.payloads import decode_json, encode_payload
from bide.core.records import NewTask, Record, State
from bide.core.retry import FOREVER, PRESETS
from bide.ports import remote
from bide.service.schemas import one_line, task_shape
from bide.settings import Settings
from bide.sinks.webhook.guard import Guard
from bide.stores.listeners import Listeners
from bide.stores.mysql import MySqlStore
from bide.stores.mysql.connection import address_of as mysql_address
from bide.stores.postgres import PostgresStore
from bide.stores.postgres.connection import address_of as postgres_address
from bide.stores.postgres.wakes import Subscription
from bide.stores.redis import RedisStore
from bide.stores.redis.address import address_of as redis_address
from bide.stores.redis.layout import Layout, flags_of, record_of, seed_of
from bide.stores.redis.wakes import Subscriber
from bide.stores.sql.operations import STATE, values_of
from bide.stores.sql.operations import record_of as record_of_row
from bide.stores.sqlite import rows
from bide.testing.clock import FIRST_INSTANT as NOW
from bide.wiring import store_maker, without_secrets

SCHEMES = (
    "memory", "sqlite", "redis", "rediss", "unix", "redis+sentinel", "redis+cluster", "postgresql", "postgres",
    "mysql", "mariadb", "http", "https", "ftp", "REDIS",
)  # fmt: skip
HOSTS = (
    "localhost", "127.0.0.1", "db.example.com", "[::1]", "[fe80::1%25eth0]", "[::ffff:127.0.0.1]", "h", "xn--b.example",
    "", "[", "]", "[::1", "a_b", "1", "a..b", "host\u2100", "bücher.example", "h:", "[v1.x]",
)  # fmt: skip
PORTS = (
    "", ":6379", ":0", ":65535", ":65536", ":99999", ":x", ":-1", ":\u00b2", ":+1", ":1_0", ": 1", ":\u0661", ":", "::",
)  # fmt: skip
PATHS = (
    "", "/", "/0", "/shop.db", "//tmp/x.db", "/mymaster/0", "/mymaster", "/%00", "/%2F", "/a/b/c", "/\u00b2", "/-1",
    "/é", "/db;x",
)  # fmt: skip
OPTIONS = (
    "namespace=shop", "shards=4", "shards=0", "wait_replicas=1", "tls=1", "db=3", "ssl_cert_reqs=none", "schema=bide",
    "prefix=shop_", "pooler=transaction", "ssl_mode=required", "insecure=1", "sslmode=disable", "prefix=",
    "socket=/tmp/x", "target_session_attrs=any", "port=5432", "host=a,b", "port=1,2,3", "user=u", "passfile=/nowhere",
    "sslmode=verify-full", "=", "&", "a", "%00=1", "namespace=%ff", "schema=pg_x", "ssl_ca=/nowhere", "=x",
    "command_timeout=1", "dbname=x",
)  # fmt: skip
SECRET = "s3cr3t"
SERVERS = ("redis", "rediss", "redis+sentinel", "redis+cluster", "postgresql", "postgres", "mysql", "mariadb")


@st.composite
def store_urls(draw: DrawFn) -> str:
    secret = f"{SECRET}{draw(st.integers(0, 2**30)):x}"
    word = draw(st.sampled_from([secret, quote(f"{secret}@/:?#[]%é"), f"{secret}%zz", f"{secret}%00", f"{secret}%ff"]))
    before = draw(
        st.sampled_from(["", f"user:{word}@", f":{word}@", f"{word}@", "user@", "@", f"user:{word}@@", f"{word}:x@y@"])
    )
    odd = st.builds(str.__add__, st.sampled_from(HOSTS), st.sampled_from(PORTS))
    places = draw(st.lists(st.sampled_from(["localhost", "h:1"]) | odd, min_size=1, max_size=3))
    options = "&".join(draw(st.lists(st.sampled_from(OPTIONS), max_size=2)))
    scheme, path, end = (draw(st.sampled_from(one)) for one in (SCHEMES, PATHS, ("", "#", "#f")))
    return f"{scheme}://{before}{','.join(places)}{path}{'?' if options else ''}{options}{end}"


@fuzz(400, url=changed(store_urls()))
def test_urls_of_stores(url: str) -> None:
    """A store is made of it, and not opened; or it is refused, and no password is shown in either case."""
    hidden = password(url)
    settings = None
    shown = without_secrets(url)
    with refusals(BideError) as refused:
        settings = Settings.from_env({"BIDE_STORE": url})
        shown += repr(store_maker(settings.store, settings)())
    assert hidden is None or hidden not in shown + "".join(map(str, refused))
    if refused or settings is None:
        return
    scheme = urlsplit(settings.store).scheme
    hosts: tuple[tuple[str, int], ...] = ()
    if scheme in ("redis", "rediss", "redis+cluster", "redis+sentinel"):
        address = redis_address(settings.store)
        hosts = address.hosts
        assert address.kind in ("single", "cluster", "sentinel")
        assert hosts
        assert 0 <= address.db <= 1_000_000
        assert address.shards is None or 1 <= address.shards <= 1024
    elif scheme in ("mysql", "mariadb"):
        hosts = mysql_address(settings.store).hosts
    elif scheme in ("postgresql", "postgres"):
        read_by_the_driver(postgres_address(settings.store).dsn)
    for host, port in hosts:
        assert host
        assert type(port) is int
        assert 0 < port <= 65_535


def password(url: str) -> str | None:
    """How the password of a server's URL begins, if it stands where one does: before an @, and not said in the path
    already; None: there is none that could be told from other text."""
    scheme, separator, rest = url.partition("://")
    before, found, after = rest.partition(SECRET)
    if not found or not separator or scheme not in SERVERS or set("/?#@") & set(before):
        return None
    options = re.split("[?&]", after)
    return found + after[:4] if any("@" in one.partition("=")[0] for one in options) else None


def read_by_the_driver(dsn: str) -> None:
    """What asyncpg refuses when it opens is told as one of these."""
    unused = dict.fromkeys(
        ("host", "port", "user", "password", "passfile", "database", "command_timeout", "ssl", "direct_tls",
         "server_settings", "target_session_attrs", "krbsrvname", "gsslib", "service", "servicefile")
    )  # fmt: skip
    sizes = dict.fromkeys(("statement_cache_size", "max_cached_statement_lifetime", "max_cacheable_statement_size"), 0)
    try:
        connect_utils._parse_connect_arguments(dsn=dsn, **unused, **sizes)
    except (exceptions.InterfaceError, ValueError, OSError):
        return


# --- what was found, and is not found by chance again


@pytest.mark.parametrize(
    "url",
    [
        "redis://[::1", "redis://[.x]/0", "sqlite://[x", "http://[", "mysql://[::1/db", "postgresql://h]/db",
        "redis://h:0/0", "redis://h:65536", "redis+cluster://h:6379,h:99999", "mysql://h:²/db", "mysql://h:1_0/db",
        "postgresql://h:x/db", "postgresql://h:0/db", "postgresql://h,/db", "postgresql://h:99999/db",
    ],
)  # fmt: skip
def test_what_is_no_url_of_a_store_is_said_to_be_none(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        store_maker(url, Settings())
    assert caught.value.field == "store"


@pytest.mark.parametrize("store", [RedisStore, MySqlStore, PostgresStore])
def test_a_store_says_so_by_itself(store: type[RedisStore | MySqlStore | PostgresStore]) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        store("redis://[::1")


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "postgresql", "mysql"])
@pytest.mark.parametrize("password", ["s3cret/x", "s3cret?x", "s3cret#x"])
def test_a_password_that_is_not_percent_encoded_is_not_shown(scheme: str, password: str) -> None:
    with pytest.raises(BadInput) as caught:
        store_maker(f"{scheme}://user:{password}@host/0", Settings())
    assert "s3cret" not in str(caught.value)
    assert "%2F" in caught.value.accepted


async def test_a_port_in_the_options_that_is_none_is_the_urls_fault() -> None:
    store = PostgresStore("postgresql:///db?host=h&port=x")
    with pytest.raises(BadInput, match="a URL that the driver can read"):
        await store.open()


@pytest.mark.parametrize("url", ["https://user:s3cret/x@host/", "x//user:s3cret@host://y"])
def test_a_password_in_the_url_of_a_webhook_is_not_shown(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        Guard().target(url)
    assert "s3cret" not in str(caught.value)


HEADERS = st.sampled_from([None, {"a": "b"}, {"traceparent": "00-1-2-01", "é": "ü"}])


@fuzz(400, retry=st.sampled_from([None, *PRESETS.values()]), headers=HEADERS, draws=st.data(), record=records())
def test_options(retry: Any, headers: Any, draws: st.DataObject, record: Record) -> None:
    sound = encode_options(retry, headers)
    data = draws.draw(near_bytes(sound))
    with refusals(DecodeError) as refused:
        read = decode_options(data).retry
        assert data != sound or read == retry
        for failures in (1, 2, 30, FOREVER):
            pause = read.delay(failures, random.Random(1).random) if read else None
            assert pause is None or (type(pause) is int and 0 <= pause <= LONGEST)
    assert not refused or data != sound
    worked_on(replace(record, options=data))


PAYLOADS: list[Any] = [{"number": 42}, [1, 2.5, None, "é"], "text", {"a": {"b": [[]]}}, 2**70, b"\0\xff"]
ODD_JSON = [
    b"[" * 100_000, b'{"a":' * 5_000, b"9" * 5_000, b"1e999", b"-0", b'"\\ud800"', b"\xef\xbb\xbf1", b" ",
]  # fmt: skip


@fuzz(
    400,
    data=mostly(st.sampled_from(PAYLOADS).map(encode_payload).flatmap(near_bytes), st.sampled_from(ODD_JSON)),
    record=records(),
)
def test_payloads(data: bytes, record: Record) -> None:
    """A payload of any bytes is shown, and decoded or refused as a payload."""
    with refusals(BadPayload) as refused:
        read = decode_json(data)
        with suppress(BadPayload):  # such as a number that JSON has and cannot say: 1e999
            assert decode_json(encode_payload(read, 2**30)) == read or read != read
    assert all(str(error).startswith("payload") for error in refused)
    worked_on(replace(record, payload=data))


@fuzz(
    400,
    new=st.builds(
        NewTask, st.just("t"), st.just("k"), st.sampled_from([new_id(), "odd id", new_id().upper()]), st.just(At(0)),
        st.binary(max_size=20), st.sampled_from([None, "g", "é" * 20]), st.sampled_from([b"", b"\x80"]),
        deadline=st.sampled_from([None, 0, NOW]),
    ),
    under_way=st.none() | st.integers(0, 4),
    draws=st.data(),
)  # fmt: skip
def test_bodies_of_redis(new: NewTask, under_way: int | None, draws: st.DataObject) -> None:
    """What was put together is read back; damage is told as such, or leaves a task."""
    flags, seed = flags_of(new), seed_of(new, flags_of(new))
    times = b"".join((NOW + number).to_bytes(6, "big") for number in (3, 2, 4))
    if under_way is not None:
        flags |= 8 | under_way
        counts = b"".join(number.to_bytes(4, "big") for number in (2, 1, 0))
        seed = NOW.to_bytes(6, "big") + counts + times[:12] + b"\1w" + (3).to_bytes(4, "big") + b"bad" + seed
    sound = bytes([flags]) + (7).to_bytes(7, "big") + times + seed
    data = draws.draw(near_bytes(sound))
    record = None
    with refusals(ValueError):
        record = record_of("t", "k", data)
    if record is None:
        assert data != sound
        return
    if data == sound:
        assert (record.id, record.payload, record.group, record.options, record.deadline) == (
            new.id, new.payload, new.group, new.options, new.deadline,
        )  # fmt: skip
    worked_on(record)


ODD_INTEGERS = NUMBERS.map(lambda number: number % 2**63) | st.sampled_from([LAST_INSTANT + 1, -1, 0, -(2**63), 2**62])


@fuzz(400, record=records(), draws=st.data(), state=mostly(st.none(), st.sampled_from([*range(6), 9, -1]), 7))
def test_rows_of_sql(record: Record, draws: st.DataObject, state: int | None) -> None:
    """A column or two hold what another program, or a fault, left there."""
    row: list[Any] = [record.topic, record.key, *values_of(record, record.error)[2:], 1]
    assert record_of_row(row) == record or record.finished_at
    integers = [place for place, value in enumerate(row) if type(value) is int and place != STATE]
    for place in draws.draw(st.lists(st.sampled_from(integers), min_size=1, max_size=3)):
        row[place] = draws.draw(ODD_INTEGERS)
    if state is not None:
        row[STATE] = state
    if draws.draw(st.booleans()):
        try:
            read = record_of_row(row)
        except IndexError:
            assert row[STATE] not in range(5)
            row = [value.encode("utf-8", "replace") if isinstance(value, str) else value for value in row]
            read = rows.mended(row)
    else:
        for place in (0, 1, 2, 3, 12, 16):  # those of text
            if row[place] is not None:
                row[place] = draws.draw(damaged(str(row[place]).encode("utf-8", "replace")))
        read = rows.mended(row)
    worked_on(read)


WAKES = {"redis": b"3 %d t" % NOW, "postgres": b'{"t":%d}' % NOW, "http": b'["t",%d]\n' % NOW}


@fuzz(100, said=st.sampled_from(list(WAKES)).flatmap(lambda kind: st.tuples(st.just(kind), near_bytes(WAKES[kind]))))
def test_messages_of_wakes(loop: Loop, said: tuple[str, bytes]) -> None:
    """What is none is passed over, and whoever listens goes on."""
    kind, data = said
    heard = loop.finish(told_by(kind, data))
    assert data != WAKES[kind] or heard == [("t", NOW)]
    listeners = Listeners(logging.getLogger("bide.fuzz"))
    for topic, wake in heard:
        listeners.notify(topic, wake)


async def told_by(kind: str, data: bytes) -> list[tuple[str, int]]:
    heard: list[tuple[str, int]] = []
    if kind == "redis":
        layout = Layout("n", 4)
        subscriber = Subscriber(None, layout, None, "e", lambda shard, topic, wake: heard.append((topic, wake)))  # type: ignore[arg-type]
        subscriber.stop()  # it has no server to listen to
        subscriber._take([b"message", layout.wake_channel(), data])
    elif kind == "postgres":
        nowhere = Mock(notify=lambda wakes: heard.extend(wakes.items()))  # it has no server to listen to
        Subscription(nowhere, "c", patience=1)._take(None, 1, "c", data.decode("utf-8", "replace"))
    else:
        with suppress(ValueError):
            heard.append(remote.read_wake(data))
    return heard


# --- what was found


@pytest.mark.parametrize(
    "damage",
    [
        {"due_at": 2**48 - 1, "wake_at": 2**62},
        {"created_at": -(2**62), "deadline": 2**62},
        {"token": -(2**63)},
        {"options": b"\x81\xa7headers\x81\xa1a\xa1\xff"},
        {"payload": b"1e999"},
    ],
)
def test_a_damaged_task_can_be_shown_and_settled(damage: dict[str, Any]) -> None:
    worked_on(made({"state": State.LEASED, **damage}))


def test_a_name_that_no_utf8_can_say_is_shown_escaped() -> None:
    shown = task_shape(made({"topic": "\udcfft", "key": "é\udc80"}))
    line = json.loads(one_line(shown))
    assert (line["topic"], line["key"]) == ("\\udcfft", "é\\udc80")
    assert line["due_at"] == task_shape(SOUND).due_at
