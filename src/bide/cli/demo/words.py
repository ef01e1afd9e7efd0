"""What the terminal says beside the live traffic: where to look and what to try, then a line a minute."""

from __future__ import annotations

import logging
from datetime import timedelta

from bide.cli.demo.coupons import AUDIENCE, Coupons
from bide.cli.demo.orders import SALE, Orders
from bide.cli.demo.payments import Payments
from bide.cli.demo.reminders import GUESTS, SUMMER
from bide.cli.demo.story import millis_of
from bide.core.instants import Millis, as_datetime
from bide.engine.history import MINUTE, Past, Row


def opening(where: str, store: str, orders: Orders, coupons: Coupons) -> str:
    """Where the console is, and the three stories that it tells best."""
    ends, evening = _clock(orders.sale_ends), coupons.evening
    begins, until = (millis_of(evening + timedelta(hours=hours)) for hours in (-12, 4))
    return f"""\
The console is at {where}
Live traffic of a small town, on {store}. Ctrl-C ends it; started again it goes on.

Three things to try:
  1. Why was that order closed late? The {SALE:,} orders of a sale have to be paid by {ends}.
     A minute later see {where}/tasks/order.close/{orders.last_of_the_sale}
  2. When is the next peak, and what does it need? {evening:%A} at {evening:%H:%M:%S} {AUDIENCE:,} coupons are due.
     {where}/timeline?from={begins}&until={until}
  3. The summer party begins later: move its {GUESTS} reminders by an hour, all at once.
     {where}/tasks?group={SUMMER}
"""


def of_minute(minute: int, row: Row) -> str:
    """What was delivered in a minute of the epoch, and how late the latest began."""
    delivered = sum(past.begun for past in row.topics.values())
    latest, topic = max(((_latest(past), topic) for topic, past in row.topics.items()), default=(0, ""))
    length = f"{latest} ms" if latest < 1_000 else f"{latest / 1000:.1f} s"
    worst = f"; the latest began {length} late ({topic})" if delivered else ""
    return f"{_clock(minute * MINUTE)[:5]}  {delivered:,} delivered, {row.scheduled:,} scheduled{worst}"


def uneventful(record: logging.LogRecord) -> bool:
    """False for a line of the worker's about a topic whose failures are part of the show; and of who changed what.

    A filter for the terminal: that a merchant has answered badly is what the console is for.
    """
    if record.name == "bide.audit":
        return False
    told_of = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return not (record.name == "bide.worker" and told_of in Payments.topics)


def _clock(at: Millis) -> str:
    return f"{as_datetime(at).astimezone():%H:%M:%S}"


def _latest(past: Past) -> Millis:
    return past.lateness(1.0) or 0
