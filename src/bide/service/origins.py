"""Tells a request that a page of another site made a browser send, which the browser's user never meant.

By what browsers say of a request and pages cannot change, in the order of Go's `http.CrossOriginProtection`, which is
the outcome of F. Valsorda's research ("Cross-Site Request Forgery", 2025): Sec-Fetch-Site where there is one, else
Origin against Host, else it is no browser. What neither shows is DNS rebinding: there the attacker's name leads to this
address, so to the browser it is the same site. What gives that away is the name itself, in Host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from bide.core.errors import BadInput
from bide.service.callers import AccessRefused

_OWN = frozenset({"same-origin", "none"})
"""`none` is the user: an address typed in, a bookmark. `same-site` is another port or subdomain, which is another's."""
_PROXIED = frozenset({b"forwarded", b"via", b"x-real-ip"})
Networks: TypeAlias = Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]
_PORTS = {"http": "80", "https": "443"}


class Foreign(AccessRefused):
    """A page of another site is behind this request, or a name that is not this service's."""

    status = 403
    title = "Forbidden"
    code = None

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.detail,)


def refuse_foreign_page(*, host: str | None, origin: str | None, site: str | None) -> None:
    """Raises Foreign where a page of another origin sent this. The arguments are Host, Origin and Sec-Fetch-Site.

    Call it for whatever changes something and is known by a cookie, or by nothing at all. Who sends a bearer token
    needs no such check: no page of another's has it.
    """
    if site is not None:
        if site not in _OWN:
            raise Foreign("a page of another site sent this; open the console itself, or send a token")
        return
    if origin is not None:
        place = _place(origin)
        if place is None or host is None or place != _place(f"//{host}", origin):
            raise Foreign("a page of another origin sent this; open the console itself, or send a token")


def refuse_foreign_name(host: str | None) -> None:
    """Raises Foreign unless Host is this machine by an address of loopback or as localhost.

    For callers without a token of a service on loopback. A request without Host comes from no browser.
    """
    if host is not None and not is_loopback_name(host_name(host)):
        raise Foreign("without a token this service is called by 127.0.0.1, [::1] or localhost only, not by that name")


def refuse_proxied(headers: Iterable[bytes]) -> None:
    """Raises Foreign where the names of the headers tell that a proxy has passed this on.

    For callers without a token of a service on loopback: who calls the proxy may be anybody, whatever Host says.
    """
    if any(name in _PROXIED or name.startswith(b"x-forwarded-") for name in headers):
        raise Foreign("without a token this service is called directly, not through a proxy (bide token add)")


def networks_of(proxies: Iterable[str]) -> Networks:
    """Addresses and networks in text. Raises BadInput."""
    found = []
    for text in proxies:
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise BadInput("proxies", text, f"an address, or a network such as 10.1.0.0/16 ({error})") from None
    return found


def peer_of(client: str, forwarded: str | None, proxies: Networks) -> str:
    """The address that called: the client's, or the last in X-Forwarded-For that is no proxy's of ours, which is the
    last one that somebody whom we trust has written. What is no address is nobody's."""
    named = [] if forwarded is None else forwarded.split(",")
    while named and proxies and _is_of(client, proxies):
        try:
            client = str(ipaddress.ip_address(named.pop().strip()))
        except ValueError:
            break
    return client


def _is_of(address: str, networks: Networks) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(found in network for network in networks)


def is_loopback_name(name: str) -> bool:
    """Whether `name`, as a browser sends it, can only be this machine; `*.localhost` is one by RFC 6761."""
    if name == "127.0.0.1":  # almost always, and reading an address takes long
        return True
    name = name.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """Host without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isascii() and port.isdigit() and (":" not in name or name.endswith("]")) else host


def _place(url: str, like: str = "") -> str | None:
    """Name and port of a URL, without what goes without saying; None for what is none, such as `null`."""
    scheme, found, rest = url.partition("//")
    if not found or not rest or any(letter in rest for letter in "/?#@\\ "):
        return None
    scheme = (scheme or like.partition("//")[0]).removesuffix(":").lower()
    rest = rest.lower()
    usual = _PORTS.get(scheme)
    return rest.removesuffix(f":{usual}") if usual else rest
