"""URLs of every kind of store, of services and of webhooks: right, or refused without showing a password."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from asyncpg import connect_utils, exceptions
from hypothesis import example
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from tests.fuzz.cases import changed, fuzz, near, refusals

from bide.core.errors import BadInput, BideError
from bide.settings import Settings
from bide.sinks.webhook.guard import Guard
from bide.stores.mysql import MySqlStore
from bide.stores.mysql.connection import address_of as mysql_address
from bide.stores.postgres import PostgresStore
from bide.stores.postgres.connection import address_of as postgres_address
from bide.stores.redis import RedisStore
from bide.stores.redis.address import address_of as redis_address
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


V4, V6 = st.integers(0, 2**32 - 1), st.integers(0, 2**128 - 1)
CALLED = st.one_of(
    st.sampled_from(
        ["hooks.example.com", "8.8.8.8", "[2606:4700::1111]", "127.0.0.1", "[::1]", "localhost", "10.0.0.1",
         "169.254.169.254", "2130706433", "0x7f.1", "0177.0.0.1", "127.1", "[::ffff:10.0.0.1]", "[64:ff9b::a00:1]",
         "[2002:a00:1::]", "1.1.1.1.", "hooks.example.com.", "0", "[fe80::1%25eth0]", "localhost.", "a.localhost",
         "xn--bcher-kva.example", "\uff11.1.1.1", "internal.host", "trusted.host:8080"]
    ),
    V4.map(str), V4.map(ipaddress.IPv4Address).map(str), V6.map(ipaddress.IPv6Address).map("[{}]".format),
)  # fmt: skip
HOOKS = st.builds(
    "{}://{}{}{}{}".format,
    st.sampled_from(["https", "http", "HTTPS", "ftp"]),
    st.sampled_from(["", "", "u:p@", "@"]),
    CALLED,
    st.sampled_from(["", "", ":443", ":0", ":99999", ":8080", ":"]),
    st.sampled_from(["", "/", "/a?b=c", "/%0d%0a", "?x", "#f", "/@evil", "\\@evil"]),
)
NETWORK = "192.0.2.0/24"


@example(url="https://u:p@/x@h/", allow=(), plain_http=False)
@fuzz(
    400,
    url=HOOKS | changed(HOOKS),
    allow=st.sampled_from([(), ("trusted.host:8080",), (NETWORK,)]),
    plain_http=st.booleans(),
)
def test_urls_of_webhooks(url: str, allow: tuple[str, ...], plain_http: bool) -> None:
    """What is let through goes where the C library's own reading says, and that is no address inside."""
    guard = Guard(allow, plain_http=plain_http)
    target = None
    with refusals() as refused:
        target = guard.target(url)
    if target is None:
        assert "//u:p@" not in url or "u:p" not in str(refused[0]), "the password is shown"
        return
    parts = urlsplit(url)
    name = parts.hostname or ""
    assert parts.scheme in ("http", "https")
    assert "@" not in parts.netloc
    assert target.host.startswith(name.rstrip(".")) or ":" in name, f"two parsers read {target.host!r} and {name!r}"
    if target.trusted:
        assert target.host in allow
        return
    found = read_by_c(name)
    if found is not None:
        assert (found in ipaddress.ip_network(NETWORK) and NETWORK in allow) or (
            found.is_global and not found.is_private and not found.is_loopback
        )
        assert guard.refusal(str(found)) is None, f"{found} is let through here and refused there"


def read_by_c(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that the C library takes `name` for; None where it is a name."""
    try:
        return ipaddress.IPv4Address(socket.inet_aton(name.rstrip(".")))
    except UnicodeEncodeError:
        return None
    except OSError:
        pass
    try:
        return ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None


@fuzz(
    400,
    entry=near(st.sampled_from(["10.1.0.0/16", "receiver.internal:8080", "::1/128", "[::1]:80", "10.0.0.1/8", "h:0"])),
    address=near(st.sampled_from(["10.1.2.3", "8.8.8.8", "::1", "fe80::1%eth0", "127.0.0.1"])),
)
def test_what_an_operator_allows_webhooks_to_call(entry: Any, address: str) -> None:
    guard = None
    with refusals():
        guard = Guard([entry])
    if guard is None:
        return
    refused = guard.refusal(address)
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        assert refused is not None, "no address is let through"
        return
    if refused is None:
        try:
            assert found.is_global or found in ipaddress.ip_network(entry, strict=False)
        except ValueError:  # the entry is of a host, and lets no address through
            assert found.is_global


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
