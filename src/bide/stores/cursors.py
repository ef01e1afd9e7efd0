"""Cursors, which encode where a page ended: the same for every store, and validated here."""

from __future__ import annotations

import base64
from typing import Annotated

import msgspec

from bide.core.errors import BadInput
from bide.core.records import Filter, Record, Topic

_Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A number that a database can compare."""
_LONGEST = 2_000
"""The longest cursor in characters; the longest names need fewer."""


class Place(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The end of a page, as a cursor encodes it."""

    order: str
    """The index that the page was read from: "name", "group", "live" or "ended"."""
    topic: Topic
    key: str = ""
    instant: _Whole = -1
    row: _Whole = -1
    """On a SQL store, tells equal times apart. On Redis, the step of a list by name."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Place)


def order_of(where: Filter) -> str:
    """The order of the list that a filter selects."""
    if where.group is not None:
        return "group"
    if where.live:
        return "live"
    return "name" if where.state is None else "ended"


def place_of(order: str, record: Record, row: int) -> Place:
    """The place after this task."""
    instant = record.wake_at if order == "live" else record.finished_at or 0
    return Place(order, record.topic, record.key, instant, row)


def write_cursor(place: Place) -> str:
    return base64.urlsafe_b64encode(_encoder.encode(place)).decode("ascii")


def read_cursor(text: str | None, where: Filter) -> Place:
    """The place that a cursor encodes; without a cursor, the beginning.

    Raises BadInput if the cursor is damaged, or belongs to a list in another order or of another topic.
    """
    order = order_of(where)
    if text is None:
        return Place(order, "")
    try:
        if len(text) > _LONGEST:
            raise ValueError
        place = _decoder.decode(base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True))
        if "\0" in place.topic or "\0" in place.key:  # no name contains NUL, and not every database can query for it
            raise ValueError
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise BadInput("cursor", text, "the cursor of the previous page, unchanged") from None
    if place.order != order:
        raise BadInput("cursor", text, "a cursor of this list; this one is from a list in another order")
    if where.topic is not None and place.topic != where.topic:
        raise BadInput("cursor", text, "a cursor of this list; this one is from another topic")
    return place
