"""Where a page ended, as its cursor says it: on every store, and checked here for all of them."""

from __future__ import annotations

import base64
from typing import Annotated

import msgspec

from bide.core.errors import BadInput
from bide.core.records import Filter, Record, Topic

_Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A number that a database can compare."""
_LONGEST = 2_000
"""Characters; more than the longest names make."""


class Place(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The end of a page, which a cursor says."""

    order: str
    """"name", "group", "live" or "ended": which index the page was read from."""
    topic: Topic
    key: str = ""
    instant: _Whole = -1
    row: _Whole = -1
    """Of a SQL store: tells equal times apart. On Redis: the step of a list by name."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Place)


def order_of(where: Filter) -> str:
    """The order of a list, by what is asked for."""
    if where.group is not None:
        return "group"
    if where.wake_from is not None or where.wake_before is not None:
        return "live"
    if where.state is None:
        return "name"
    return "live" if where.state.live else "ended"


def place_of(order: str, record: Record, row: int) -> Place:
    """After this task."""
    instant = record.wake_at if order == "live" else record.finished_at or 0
    return Place(order, record.topic, record.key, instant, row)


def write_cursor(place: Place) -> str:
    return base64.urlsafe_b64encode(_encoder.encode(place)).decode("ascii")


def read_cursor(text: str | None, where: Filter) -> Place:
    """The place that a cursor names; without one, the beginning.

    Raises BadInput for one that is damaged, of a list in another order, or at a place outside of what is asked for.
    """
    order = order_of(where)
    if text is None:
        return Place(order, "")
    try:
        if len(text) > _LONGEST:
            raise ValueError
        place = _decoder.decode(base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True))
        if "\0" in place.topic or "\0" in place.key:  # no name has one, and not every database can be asked for it
            raise ValueError
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise BadInput("cursor", text, "the cursor of the page before, as it came") from None
    if place.order != order:
        raise BadInput("cursor", text, "a cursor of this list: this one is of a list in another order")
    if where.topic is not None and place.topic != where.topic:
        raise BadInput("cursor", text, "a cursor of this list: this one is of another topic")
    return place
