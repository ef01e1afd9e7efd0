"""A store's URL in its parts."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

from bide.core.errors import BadInput


def parts_of(url: str, accepted: str, *, schemes: Collection[str] = (), field: str = "store") -> SplitResult:
    """What can be read has, if `schemes` are given, one of them and no fragment. Raises BadInput that shows nothing of
    what may be a password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise BadInput(field, "a URL that cannot be read", accepted) from None
    if schemes and (parts.scheme not in schemes or parts.fragment):
        raise BadInput(field, parts.scheme, accepted)
    return parts
