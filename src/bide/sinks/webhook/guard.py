"""Guards webhooks against calling internal addresses: a URL is checked as text, and again when a connection is made.

The check of the text reports at once what can never work. The protection is the second check: a socket is created for
one address, and only if that address is public or allowed. There is no way around it, whatever a name resolved to
before, and however an address was written.

An operator can allow a network ("10.1.0.0/16"), whose addresses may be called under any name, or a host with its port
("receiver.internal:8080"), which is trusted whatever its name resolves to.

Plain http is refused, unless the host or the address is allowed, or `plain_http` permits it everywhere. The signature
reveals a changed body but does not keep it secret. The answer is not signed, so an attacker on the network path could
answer "200 OK" for a receiver that was never reached.

A table in this module defines the public addresses (`blocked_reason`): the IANA registries of special-purpose addresses
for IPv4 and IPv6 as of 2025. `ipaddress.is_global`, which changes between Python versions, is checked as well. A URL
often comes from a customer, and bide runs inside its operator's network. Without the table, a customer could make bide
call the cloud's metadata service, a database, or bide itself (server-side request forgery).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, TypeAlias

from msgspec import Struct

from bide.core.errors import BadInput

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

LONGEST_URL = 2_048
_HOST = r"(?P<host>\[[0-9a-f:.]+\]|[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?)"
_URL = re.compile(
    rf"(?P<scheme>https?)://{_HOST}(?P<port>:[0-9]{{1,5}})?(?P<rest>[/?][!-~]*)?", re.ASCII | re.IGNORECASE
)
"""Stricter than the standards, so that no two parsers can see different hosts in one URL."""
_HOST_AND_PORT = re.compile(rf"{_HOST}:(?P<port>[0-9]{{1,5}})", re.ASCII | re.IGNORECASE)
_ENDS_IN_A_NUMBER = re.compile(r"(?:^|\.)(?:[0-9]+|0x[0-9a-f]*)\.?$", re.ASCII | re.IGNORECASE)
"""Matches text that the C library may read as an IPv4 address: 2130706433, 0177.1, 0x7f.0.0.1. This is the rule of the
URL standard (https://url.spec.whatwg.org/#ends-in-a-number-checker)."""
_LONGEST_HOST = 253
_NOT_IN_REST = frozenset('#\\"<>^`{|}')
_PORTS = {"http": 80, "https": 443}
_ACCEPTED_URL = "https://host/path in plain ASCII (names as xn--..., the rest percent-encoded)"
_ACCEPTED_ENTRY = 'a network such as "10.1.0.0/16", or a host with its port such as "receiver.internal:8080"'

_V4 = tuple(
    (IPv4Network(network), what)
    for network, what in (
        ("0.0.0.0/8", "an unspecified address"),
        ("10.0.0.0/8", "a private address"),
        ("100.64.0.0/10", "an address shared behind a carrier's NAT"),
        ("127.0.0.0/8", "a loopback address"),
        ("168.63.129.16/32", "the host of an Azure machine"),
        ("169.254.0.0/16", "a link-local address"),
        ("172.16.0.0/12", "a private address"),
        ("192.0.0.0/24", "a protocol's own address"),
        ("192.0.2.0/24", "a documentation address"),
        ("192.88.99.0/24", "a 6to4 relay"),
        ("192.168.0.0/16", "a private address"),
        ("198.18.0.0/15", "a benchmarking address"),
        ("198.51.100.0/24", "a documentation address"),
        ("203.0.113.0/24", "a documentation address"),
        ("224.0.0.0/4", "a multicast address"),
        ("240.0.0.0/4", "a reserved address"),
    )
)
_V6 = tuple(
    (IPv6Network(network), what)
    for network, what in (
        ("::/128", "an unspecified address"),
        ("::1/128", "a loopback address"),
        ("::ffff:0:0/96", "an IPv4 address written as IPv6"),
        ("::/96", "an IPv4 address written as IPv6"),
        ("64:ff9b:1::/48", "a NAT64 address of this network"),
        ("2001::/32", "a Teredo tunnel"),
        ("2001::/23", "a protocol's own address"),
        ("2001:db8::/32", "a documentation address"),
        ("2002::/16", "a 6to4 tunnel"),
        ("3fff::/20", "a documentation address"),
        ("fc00::/7", "a private address"),
        ("fe80::/10", "a link-local address"),
        ("fec0::/10", "a site-local address"),
        ("ff00::/8", "a multicast address"),
    )
)
_GLOBAL_V6 = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
"""Prefixes through which an IPv6-only network reaches IPv4; the embedded address is checked (RFC 6052)."""


class AddressRefused(OSError):
    """No connection may be made to this address. An OSError, as other failures to connect are."""


class Target(Struct, frozen=True):
    """A URL that passed the check of its text."""

    url: str
    """As it was given, with its scheme and host in lower case."""
    host: str
    """With its port: "hooks.example.com:443". The name for limits and messages."""
    trusted: bool
    """True if host and port are allowed: then the address is not checked."""


class Guard:
    """Decides which URLs may be called. `allow`: networks, and hosts with a port. Raises BadInput for other entries."""

    def __init__(self, allow: Iterable[str] = (), *, plain_http: bool = False) -> None:
        self._plain_http = plain_http
        self._networks: list[Network] = []
        self._hosts: set[str] = set()
        if isinstance(allow, str):
            raise BadInput("allow", allow, "a list, even for a single entry")
        for place, entry in enumerate(allow):
            self._allow(f"allow[{place}]", entry)

    @property
    def trusts_hosts(self) -> bool:
        return bool(self._hosts)

    def _allow(self, field: str, entry: object) -> None:
        if not isinstance(entry, str):
            raise BadInput(field, entry, _ACCEPTED_ENTRY)
        try:
            self._networks.append(ip_network(entry))
        except ValueError:
            found = _HOST_AND_PORT.fullmatch(entry)
            if found is None or not 1 <= int(found["port"]) <= 65_535:
                raise BadInput(field, entry, _ACCEPTED_ENTRY) from None
            self._hosts.add(_with_port(found["host"], int(found["port"])))

    def target(self, url: object, field: str = "url") -> Target:
        """Check a URL. Raises BadInput, naming `field`, for what is not a URL or must not be called.

        Errors show no more of a URL than its scheme and host: a path may hold a password.
        """
        shown = _shown(url)
        if not isinstance(url, str) or len(url) > LONGEST_URL:
            raise BadInput(field, shown, f"{_ACCEPTED_URL}, at most {LONGEST_URL} characters")
        if "@" in _authority(url):
            raise BadInput(field, shown, "a URL without a user and password")
        found = _URL.fullmatch(url)
        if found is None or len(found["host"]) > _LONGEST_HOST or not _NOT_IN_REST.isdisjoint(found["rest"] or ""):
            raise BadInput(field, shown, _ACCEPTED_URL)
        scheme, name = found["scheme"].lower(), found["host"].lower()
        port = int(found["port"][1:]) if found["port"] else _PORTS[scheme]
        if not 1 <= port <= 65_535:
            raise BadInput(field, shown, "a port from 1 to 65535")
        host = _with_port(name, port)
        trusted = host in self._hosts
        allowed = trusted or self._check_host(name, shown, field)
        if scheme == "http" and not (allowed or self._plain_http):
            raise BadInput(field, shown, f"https; for plain http allow the host: --allow {host}")
        return Target(f"{scheme}://{name}{url[found.end('host') :]}", host, trusted)

    def _check_host(self, name: str, shown: str, field: str) -> bool:
        """True for an address of an allowed network. Raises BadInput for an address that must not be called."""
        address = ip_literal(name.strip("[]"))
        if address is None:
            if name.startswith("[") or _ENDS_IN_A_NUMBER.search(name):
                raise BadInput(field, shown, "a name, or an IP address in its usual form")
            if name.removesuffix(".").rpartition(".")[2] == "localhost":
                raise BadInput(field, shown, f"a public host; this is the machine itself{_HOW_TO_ALLOW}")
            return False
        if self._is_allowed(address):
            return True
        why = blocked_reason(address)
        if why is not None:
            raise BadInput(field, shown, f"a public host; {address} is {why}{_HOW_TO_ALLOW}")
        return False

    def refusal(self, address: str) -> str | None:
        """The reason not to connect to a resolved address; None: it may be called. O(allowed networks)."""
        found = ip_literal(address)
        if found is None:
            return f"{address[:60]!r} is not an IP address"
        if self._is_allowed(found):
            return None
        why = blocked_reason(found)
        return None if why is None else f"refused: {found} is {why}{_HOW_TO_ALLOW}"

    def _is_allowed(self, address: Address) -> bool:
        return any(address in network for network in self._networks)

    def socket(self, info: tuple[Any, ...]) -> socket.socket:
        """Create the socket for an address, as aiohttp's `socket_factory`. Raises AddressRefused."""
        family, kind, protocol, _, address = info
        why = self.refusal(str(address[0]))
        if why is not None:
            raise AddressRefused(why)
        return socket.socket(family, kind, protocol)

    def __repr__(self) -> str:
        return f"<Guard that allows {sorted(self._hosts)} and {[str(network) for network in self._networks]}>"


_HOW_TO_ALLOW = " (to allow its network, or its host and port: bide serve --allow, or allow in bide.toml)"


def _with_port(name: str, port: int) -> str:
    """The canonical form of a host: lower case, no final dot, IPv6 addresses shortened."""
    plain = name.lower().removesuffix(".")
    address = ip_literal(plain.strip("[]"))
    if address is not None and address.version == 6:
        plain = f"[{address}]"
    return f"{plain}:{port}"


def _authority(url: str) -> str:
    return re.split(r"[/?#]", url.partition("://")[2], maxsplit=1)[0]


def _shown(url: object) -> str:
    """The part of a URL that an error may show: its scheme and host."""
    if not isinstance(url, str):
        return f"a {type(url).__name__}"
    scheme, separator, _ = url.partition("://")
    if not separator or "@" in scheme:
        return f"{len(url)} characters without ://"
    authority = _authority(url)
    if "@" in url and "@" not in authority:  # a user and a password that contains a "/"
        authority = authority.partition(":")[0]
    return f"{scheme}://{authority.rpartition('@')[2]}"


def blocked_reason(address: Address) -> str | None:
    """The reason not to connect to `address`, such as "a private address"; None: it is public. O(1)."""
    if isinstance(address, IPv4Address):
        return _blocked_reason_v4(address)
    if address.scope_id is not None:
        return "a link-local address"
    for network, what in _V6:
        if address in network:
            return what
    if address in _NAT64:
        within = IPv4Address(int(address) & 0xFFFF_FFFF)
        what_within = _blocked_reason_v4(within)
        return None if what_within is None else f"{what_within} ({within}) behind NAT64"
    if address not in _GLOBAL_V6 or not address.is_global:
        return "not a public address"
    return None


def _blocked_reason_v4(address: IPv4Address) -> str | None:
    for network, what in _V4:
        if address in network:
            return what
    return None if address.is_global else "not a public address"


def ip_literal(host: str) -> Address | None:
    """Parse an address in its usual form (IPv6 without brackets); None for a name or another form."""
    try:
        return ip_address(host)
    except ValueError:
        return None
