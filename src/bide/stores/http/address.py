"""URLs of a service: `http://host:8420`, `https://host/prefix`.

A token goes with every call, so it is not sent in clear text: with a token `http:` is for this machine alone, unless
the URL ends in `?insecure=1`, which says that the way there is safe (a private network, a proxy on the same host).
"""

from __future__ import annotations

import ipaddress
from urllib.parse import parse_qsl, urlsplit

from msgspec import Struct

from bide.core.errors import BadInput

_ACCEPTED = '"http://host:8420" or "https://host/prefix"; the only option is "?insecure=1"'
PORT = 8420
"""Of a service, where `http:` names none."""


class Address(Struct, frozen=True, kw_only=True):
    """What a URL says."""

    base: str
    """Where the calls are, without a slash at the end."""
    shown: str


def address_of(url: str, token: str | None) -> Address:
    """Read a URL. Raises BadInput that names what is wrong, and shows neither a password nor the token."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise BadInput("store", "a URL that cannot be read", _ACCEPTED) from None
    if "@" in parts.netloc:
        raise BadInput("store", "a URL with a password", "the token apart: Bide(url, token=...) or BIDE_TOKEN")
    if parts.scheme not in ("http", "https") or not host or parts.fragment or not url.isprintable() or " " in url:
        raise BadInput("store", url, _ACCEPTED)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    insecure = options.pop("insecure", "0")
    if options or insecure not in ("0", "1"):
        raise BadInput("store", url, _ACCEPTED)
    if token is not None and parts.scheme == "http" and insecure != "1" and not is_loopback(host):
        raise BadInput(
            "store", url,
            'a URL with "https:" when there is a token, since others on the way could read it; "?insecure=1" sends it '
            "all the same",
        )  # fmt: skip
    name = f"[{host}]" if ":" in host else host
    if port is None and parts.scheme == "http":
        port = PORT
    where = name if port is None else f"{name}:{port}"
    base = f"{parts.scheme}://{where}{parts.path.rstrip('/')}"
    return Address(base=base, shown=base)


def is_loopback(host: str) -> bool:
    """Whether what is sent to `host` stays on this machine; of names only localhost is known to."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
