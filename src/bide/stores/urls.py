"""A store's URL in its parts."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

from bide.core.errors import BadInput

_REFUSED = ("Connect call failed", "onnection refused")
"""In what the drivers say; each has an error of its own for it."""


def parts_of(url: str, accepted: str, *, schemes: Collection[str] = (), field: str = "store") -> SplitResult:
    """The parts of a URL; if `schemes` are given, of one of these and without a fragment. Raises BadInput that shows
    nothing of what may be a password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise BadInput(field, "a URL that cannot be read", accepted) from None
    if schemes and (parts.scheme not in schemes or parts.fragment):
        raise BadInput(field, parts.scheme, accepted)
    return parts


def unreached(where: str, error: BaseException) -> str:
    """The error text for a server to which no connection could be made."""
    said = str(error) or type(error).__name__
    refused = any(word in said for word in _REFUSED)
    return f"{where}: cannot be reached: {'connection refused; is it running?' if refused else said}"
