"""Splits a store's URL, and words the error for a server that cannot be reached."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

from bide.core.errors import BadInput

_REFUSED = ("Connect call failed", "onnection refused")
"""Texts in the drivers' errors for a refused connection; each driver has its own error class."""


def parts_of(url: str, accepted: str, *, schemes: Collection[str] = (), field: str = "store") -> SplitResult:
    """Split a URL. If `schemes` are given, the URL must have one of them and no fragment.

    Raises BadInput, whose text shows nothing that may be a password.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise BadInput(field, "a URL that cannot be read", accepted) from None
    if schemes and (parts.scheme not in schemes or parts.fragment):
        raise BadInput(field, parts.scheme, accepted)
    return parts


def unreached(where: str, error: BaseException) -> str:
    """The error text for a server that cannot be reached."""
    said = str(error) or type(error).__name__
    refused = any(word in said for word in _REFUSED)
    return f"{where}: cannot be reached: {'connection refused; is it running?' if refused else said}"
