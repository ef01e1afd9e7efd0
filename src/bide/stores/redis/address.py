"""Store URLs of Redis: one server, a server behind Sentinel, or a Cluster; and its options, `?name=value`.

    redis://[user:password@]host[:port][/db]            rediss:// with TLS
    unix://[user:password@]/path/to/redis.sock[?db=0]
    redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/db]
    redis+cluster://[user:password@]host[:port][,host[:port]...]

`?namespace=shop` (default bide), `?shards=16` (when the namespace is created), `?wait_replicas=1`, `?tls=1` (Sentinel,
Cluster), and redis-py's TLS options `ssl_ca_certs`, `ssl_ca_path`, `ssl_certfile`, `ssl_keyfile`, `ssl_password`,
`ssl_cert_reqs`, `ssl_check_hostname`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

from msgspec import Struct

from bide.core.errors import BadInput
from bide.stores.urls import parts_of

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "redis+cluster")
_ACCEPTED = (
    '"redis://host:6379/0", "rediss://...", "unix:///path.sock", "redis+sentinel://host:26379/service/0" or '
    '"redis+cluster://host:6379,host:6380", with options such as "?namespace=shop"'
)


class Address(Struct, frozen=True, kw_only=True):
    """The parts of a URL."""

    kind: str
    """"single", "sentinel" or "cluster"."""
    hosts: tuple[tuple[str, int], ...] = ()
    path: str | None = None
    service: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = None
    tls: bool = False
    tls_options: Mapping[str, str | bool] = {}
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    namespace: str = "bide"
    shards: int | None = None
    """None: the namespace's own number, or 16 for a new namespace."""
    wait_replicas: int = 0

    @property
    def shown(self) -> str:
        """The address without secrets."""
        where = self.path or ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{where}/{self.service}" if self.service else where


def address_of(url: str) -> Address:
    """Parse a URL. Raises BadInput, which names the error and never shows a password."""
    parts = parts_of(url, _ACCEPTED, schemes=SCHEMES)
    credentials, _, netloc = parts.netloc.rpartition("@")
    username, colon, password = credentials.partition(":")
    if credentials and not colon:
        username, password = "", credentials  # redis://secret@host is common, though redis-cli reads it differently
    given = _options(parts.query)
    path = [unquote(one) for one in parts.path.split("/") if one]
    if "db" in given and len(path) > (parts.scheme == "redis+sentinel") and parts.scheme != "unix":
        raise BadInput("db", given["db"], "the number of a database once: in the path, or as an option")
    fields: dict[str, Any] = {
        "username": unquote(username) or None,
        "password": unquote(password) or None,
        "tls": parts.scheme == "rediss" or given.pop("tls", False),
        "tls_options": {name: given.pop(name) for name in list(given) if name.startswith("ssl_")},
        **given,
    }
    if parts.scheme == "unix":
        if netloc or not parts.path:
            raise BadInput("store", "unix://" + netloc, _ACCEPTED)
        return Address(kind="single", path=unquote(parts.path), **fields)
    if parts.scheme == "redis+sentinel":
        if not path or len(path) > 2:
            raise BadInput("store", parts.path, 'the name of the service after the hosts, as in "/mymaster/0"')
        fields["db"] = _number("db", path[1], 0, 1_000_000) if len(path) == 2 else fields.get("db", 0)
        return Address(kind="sentinel", hosts=_hosts(netloc, 26_379), service=path[0], **fields)
    if parts.scheme == "redis+cluster":
        if (path and path != ["0"]) or given.get("db"):
            raise BadInput("store", parts.path, "no database, since a Cluster has only one")
        return Address(kind="cluster", hosts=_hosts(netloc, 6_379), **fields)
    if len(path) > 1:
        raise BadInput("store", parts.path, 'the number of a database, as in "/0"')
    if path:
        fields["db"] = _number("db", path[0], 0, 1_000_000)
    hosts = _hosts(netloc, 6_379)
    if len(hosts) != 1:
        raise BadInput("store", f"{len(hosts)} hosts", "one host; several belong to redis+cluster or redis+sentinel")
    return Address(kind="single", hosts=hosts, **fields)


def _hosts(netloc: str, port: int) -> tuple[tuple[str, int], ...]:
    hosts = []
    for one in netloc.split(",") if netloc else ["localhost"]:
        found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]+)(?::([0-9]{1,5}))?", one)
        if found is None or not 0 < int(found[2] or port) <= 65_535:
            raise BadInput("store", one, 'hosts such as "127.0.0.1:6379" or "[::1]:6379"')
        hosts.append((found[1].strip("[]"), int(found[2] or port)))
    return tuple(hosts)


def _options(query: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        read = _KNOWN.get(name)
        if read is None:
            raise BadInput("store", name, f"one of the options {', '.join(_KNOWN)}")
        options[name] = read(value)
    return options


def _number(name: str, text: str, least: int, most: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise BadInput(name, text, f"a whole number from {least} to {most}")
    return int(text)


def _matching(name: str, text: str, pattern: str, accepted: str) -> str:
    if not re.fullmatch(pattern, text):
        raise BadInput(name, text, accepted)
    return text


def _truth(name: str, text: str) -> bool:
    return _matching(name, text, "0|1|true|false", "0 or 1") in ("1", "true")


_NAMES = "1 to 64 letters, digits, '_', '.', '-', the first a letter or digit"
_CHECKS = '"required", "optional" or "none"'
_KNOWN: Mapping[str, Callable[[str], Any]] = {
    "namespace": lambda text: _matching("namespace", text, "[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", _NAMES),
    "shards": lambda text: _number("shards", text, 1, 1024),
    "wait_replicas": lambda text: _number("wait_replicas", text, 0, 100),
    "db": lambda text: _number("db", text, 0, 1_000_000),
    "tls": lambda text: _truth("tls", text),
    **dict.fromkeys(("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_password"), str),
    "ssl_cert_reqs": lambda text: _matching("ssl_cert_reqs", text, "required|optional|none", _CHECKS),
    "ssl_check_hostname": lambda text: _truth("ssl_check_hostname", text),
    **dict.fromkeys(("sentinel_username", "sentinel_password"), str),
}
