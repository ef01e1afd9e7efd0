"""Which IP addresses a webhook may go to: those that anybody on the internet can reach, and no other.

A webhook's URL often comes from a customer, and bide stands inside the network of whoever runs it. Without this table
a customer could have bide call the cloud's metadata service, a database, or bide itself (server-side request forgery).

The table is ours, not that of `ipaddress.is_global` alone, since that one changes between Python versions: it is the
IANA registries of special-purpose addresses for IPv4 and IPv6 as of 2025, and `is_global` is asked as well.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

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
        ("::ffff:0:0/96", "an IPv4 address in the clothes of IPv6"),
        ("::/96", "an IPv4 address in the clothes of IPv6"),
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
"""A network with IPv6 alone reaches IPv4 through these: the address within is what counts (RFC 6052)."""


def why_not(address: Address) -> str | None:
    """What is wrong with connecting to `address`: "a private address"; None: it is a public one. O(1)."""
    if isinstance(address, IPv4Address):
        return _why_not_v4(address)
    if address.scope_id is not None:
        return "a link-local address"
    for network, what in _V6:
        if address in network:
            return what
    if address in _NAT64:
        within = IPv4Address(int(address) & 0xFFFF_FFFF)
        what_within = _why_not_v4(within)
        return None if what_within is None else f"{what_within} ({within}) behind NAT64"
    if address not in _GLOBAL_V6 or not address.is_global:
        return "not a public address"
    return None


def _why_not_v4(address: IPv4Address) -> str | None:
    for network, what in _V4:
        if address in network:
            return what
    return None if address.is_global else "not a public address"


def literal(host: str) -> Address | None:
    """The address that `host` is, in its usual form (IPv6 without brackets); None for a name or another form."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def number_form(host: str) -> IPv4Address | str | None:
    """What the C library may read as an IPv4 address although it is not written as one: 2130706433, 0177.1, 0x7f.0.0.1.

    Its address, or "" if it is a number and no address; None for a name. A host is a number if its last label is one,
    as the URL standard has it (https://url.spec.whatwg.org/#ends-in-a-number-checker).
    """
    labels = host.removesuffix(".").split(".")
    if _number(labels[-1]) is None and not labels[-1].isdigit():
        return None
    numbers = [_number(label) for label in labels]
    if len(numbers) > 4:
        return ""
    value = 0
    for place, number in enumerate(numbers):
        last = place == len(numbers) - 1
        if number is None or number >= (256 ** (5 - len(numbers)) if last else 256):
            return ""
        value += number if last else number << (24 - 8 * place)
    return IPv4Address(value)


def _number(label: str) -> int | None:
    """A part of an IPv4 address in the notations of `inet_aton`: decimal, 0octal, 0xhexadecimal."""
    digits, base = label, 10
    if label[:2] in ("0x", "0X"):
        digits, base = label[2:] or "0", 16
    elif len(label) > 1 and label[0] == "0":
        digits, base = label[1:], 8
    try:
        return int(digits, base) if digits.isascii() and digits.isalnum() else None
    except ValueError:
        return None
