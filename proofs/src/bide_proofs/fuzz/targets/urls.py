"""URLs: of every kind of store, of services, and of webhooks."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Any
from urllib.parse import quote, urlsplit

from asyncpg import connect_utils, exceptions

from bide.core.errors import BadInput, BideError
from bide.settings import Settings
from bide.sinks.webhook.guard import Guard
from bide.stores.mysql.address import address_of as mysql_address
from bide.stores.postgres.address import address_of as postgres_address
from bide.stores.redis.address import address_of as redis_address
from bide.wiring import store_maker, without_secrets
from bide_proofs.fuzz.drawing import Draw
from bide_proofs.fuzz.running import Target, check, clear, pure

HOSTS = (
    "localhost", "127.0.0.1", "db.example.com", "[::1]", "[fe80::1%25eth0]", "[::ffff:127.0.0.1]", "h", "xn--b.example",
    "", "[", "]", "[::1", "a_b", "1", "a..b", "host\u2100", "bücher.example", "h:", "[v1.x]",
)  # fmt: skip
PORTS = (
    "",
    ":6379",
    ":0",
    ":65535",
    ":65536",
    ":99999",
    ":x",
    ":-1",
    ":\u00b2",
    ":+1",
    ":1_0",
    ": 1",
    ":\u0661",
    ":",
    "::",
)
OPTIONS = (
    "namespace=shop", "shards=4", "shards=0", "wait_replicas=1", "tls=1", "db=3", "ssl_cert_reqs=none", "schema=bide",
    "prefix=shop_", "pooler=transaction", "ssl_mode=required", "insecure=1", "sslmode=disable", "prefix=",
    "socket=/tmp/x",
    "target_session_attrs=any", "port=5432", "host=a,b", "port=1,2,3", "user=u", "passfile=/nowhere",
    "sslmode=verify-full",
    "=", "&", "a", "%00=1", "namespace=%ff", "schema=pg_x", "ssl_ca=/nowhere", "=x", "command_timeout=1", "dbname=x",
)  # fmt: skip
_SECRET = "s3cr3t"


def a_url(draw: Draw) -> str:
    """Of a store."""
    scheme = draw.of(
        "memory", "sqlite", "redis", "rediss", "unix", "redis+sentinel", "redis+cluster", "postgresql", "postgres",
        "mysql",
        "mariadb", "http", "https", "ftp", "REDIS",
    )  # fmt: skip
    secret = f"{_SECRET}{draw.getrandbits(30):x}"
    word = draw.of(secret, quote(f"{secret}@/:?#[]%é"), f"{secret}%zz", f"{secret}%00", f"{secret}%ff")
    before = draw.of(
        "", "", "", f"user:{word}@", f":{word}@", f"{word}@", "user@", "@", f"user:{word}@@", f"{word}:x@y@"
    )
    places = [
        draw.choice(HOSTS) + draw.choice(PORTS) if draw.chance(0.5) else draw.of("localhost", "h:1")
        for _ in range(draw.of(1, 1, 1, 2, 3))
    ]
    path = draw.of(
        "",
        "/",
        "/0",
        "/shop.db",
        "//tmp/x.db",
        "/mymaster/0",
        "/mymaster",
        "/%00",
        "/%2F",
        "/a/b/c",
        "/\u00b2",
        "/-1",
        "/é",
        "/db;x",
    )
    options = "&".join(draw.some(OPTIONS, 2))
    query = f"?{options}" if options or draw.chance(0.05) else ""
    slashes, fragment = "//" if draw.chance(0.95) else "", draw.of("", "", "", "", "#", "#f")
    return f"{scheme}:{slashes}{before}{','.join(places)}{path}{query}{fragment}"


def stores(draw: Draw) -> None:
    """A store is made of it, and not opened; or it is refused, and no password is shown in either case."""
    url = a_url(draw) if draw.chance(0.6) else draw.changed(a_url(draw))
    draw.note(url)
    hidden = _password(url)
    try:
        settings = Settings.from_env({"BIDE_STORE": url})
        store = store_maker(settings.store, settings)()
    except BideError as error:
        clear(error)
        check(hidden is None or hidden not in str(error), f"the password is shown: {error}")
        return
    check(hidden is None or hidden not in repr(store), f"the password is shown: {store!r}")
    check(hidden is None or hidden not in without_secrets(url), f"the password is shown: {without_secrets(url)}")
    settings_url = settings.store
    scheme = urlsplit(settings_url).scheme
    if scheme in ("redis", "rediss", "redis+cluster", "redis+sentinel"):
        address = redis_address(settings_url)
        check(address.kind in ("single", "cluster", "sentinel") and address.hosts, "hosts")
        _hosts(address.hosts)
        check(0 <= address.db <= 1_000_000 and (address.shards is None or 1 <= address.shards <= 1024), "numbers")
    elif scheme in ("mysql", "mariadb"):
        _hosts(mysql_address(settings_url).hosts)
    elif scheme in ("postgresql", "postgres"):
        _dsn(postgres_address(settings_url).dsn)


def _password(url: str) -> str | None:
    """How the password in a URL of a server begins, if it stands where a password does: before an @, and it is not said
    in the path already; None: there is none that could be told from other text."""
    scheme, separator, rest = url.partition("://")
    before, found, after = rest.partition(_SECRET)
    servers = ("redis", "rediss", "redis+sentinel", "redis+cluster", "postgresql", "postgres", "mysql", "mariadb")
    if not found or not separator or scheme not in servers or set("/?#@") & set(before):
        return None
    options = re.split("[?&]", after)
    return found + after[:4] if any("@" in one.partition("=")[0] for one in options) else None


def _hosts(hosts: tuple[tuple[str, int], ...]) -> None:
    for host, port in hosts:
        check(host and type(port) is int and 0 < port <= 65_535, f"the host {host!r} with the port {port!r}")


def _dsn(dsn: str) -> None:
    """As the driver reads it: what it refuses is told as a ClientConfigurationError, or a ValueError, when it opens."""
    try:
        connect_utils._parse_connect_arguments(
            dsn=dsn, host=None, port=None, user=None, password=None, passfile=None, database=None,
            command_timeout=None,
            statement_cache_size=0, max_cached_statement_lifetime=0, max_cacheable_statement_size=0, ssl=None,
            direct_tls=None, server_settings=None, target_session_attrs=None, krbsrvname=None, gsslib=None,
            service=None, servicefile=None,
        )  # fmt: skip
    except (exceptions.InterfaceError, ValueError, OSError):
        return


def webhooks(draw: Draw) -> None:
    """What is let through goes where the C library's own reading says, and that is no address inside."""
    host = draw.of(
        "hooks.example.com", "8.8.8.8", "[2606:4700::1111]", "127.0.0.1", "[::1]", "localhost", "10.0.0.1",
        "169.254.169.254",
        "2130706433", "0x7f.1", "0177.0.0.1", "127.1", "[::ffff:10.0.0.1]", "[64:ff9b::a00:1]", "[2002:a00:1::]",
        "1.1.1.1.",
        "hooks.example.com.", "0", "[fe80::1%25eth0]", "localhost.", "a.localhost", "xn--bcher-kva.example",
        "\uff11.1.1.1",
        f"{draw.getrandbits(32)}", str(ipaddress.ip_address(draw.getrandbits(32))),
        f"[{ipaddress.IPv6Address(draw.getrandbits(128))}]",
        "internal.host", "trusted.host:8080",
    )  # fmt: skip
    scheme = draw.of("https", "https", "http", "HTTPS", "ftp")
    port = draw.of("", "", ":443", ":0", ":99999", ":8080", ":")
    rest = draw.of("", "/", "/a?b=c", "/%0d%0a", "?x", "#f", "/@evil", "\\@evil")
    url = f"{scheme}://{draw.of('', '', '', 'u:p@', '@')}{host}{port}{rest}"
    url = url if draw.chance(0.5) else draw.changed(url)
    guard = Guard(draw.of((), ("trusted.host:8080",), ("192.0.2.0/24",)), plain_http=draw.chance(0.3))
    draw.note((url, guard))
    try:
        target = guard.target(url)
    except BadInput as error:
        clear(error)
        check("//u:p@" not in url or "u:p" not in str(error), f"the password is shown: {error}")
        return
    parts = urlsplit(url)
    check(parts.scheme in ("http", "https") and "@" not in parts.netloc, "a URL of the web without a password")
    name = parts.hostname or ""
    check(target.host.startswith(name.rstrip(".")) or ":" in name, f"two parsers read {target.host!r} and {name!r}")
    if target.trusted:
        check(target.host == "trusted.host:8080", "trusted")
        return
    with_c = None
    try:
        with_c = ipaddress.ip_address(socket.inet_ntoa(socket.inet_aton(name.rstrip("."))))
    except OSError:
        try:
            with_c = ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            return
    except UnicodeEncodeError:
        return
    allowed = with_c in ipaddress.ip_network("192.0.2.0/24") and "192.0.2.0" in repr(guard)
    check(
        allowed or (with_c.is_global and not with_c.is_private and not with_c.is_loopback), f"{with_c} is let through"
    )
    check(guard.refusal(str(with_c)) is None, f"{with_c} is let through here and refused there")


def allowed(draw: Draw) -> None:
    """Entries of what an operator allows, and addresses as they were resolved."""
    entry: Any = draw.text(draw.of("10.1.0.0/16", "receiver.internal:8080", "::1/128", "[::1]:80", "10.0.0.1/8", "h:0"))
    draw.note(entry)
    try:
        guard = Guard([entry])
    except BadInput as error:
        clear(error)
        return
    address = draw.text(draw.of("10.1.2.3", "8.8.8.8", "::1", "fe80::1%eth0", "127.0.0.1"))
    why = guard.refusal(address)
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        check(why is not None, "no address is let through")
        return
    if why is None and not guard._networks:
        check(found.is_global, f"{found} is let through")


TARGETS = (
    Target("stores", "URLs of stores and services", pure(stores)),
    Target("webhooks", "URLs of webhooks, and what is let through to where", pure(webhooks)),
    Target("allowed", "what an operator allows webhooks to call", pure(allowed)),
)
