"""From an answer to an outcome, without a network."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide import Dead, Retry
from bide.core.instants import In
from bide.sinks.webhook.sending import inert, outcome_of, pause_asked_for

NOW = datetime(2030, 1, 31, 8, 0, 0, tzinfo=UTC)
EPOCH = NOW.timestamp()


def date(**ahead: float) -> str:
    return format_datetime(NOW + timedelta(**ahead), usegmt=True)


ASKED: dict[str, tuple[str | None, float | None]] = {
    "nothing": (None, None),
    "seconds": ("120", 120),
    "seconds with spaces": (" 7 ", 7),
    "a date": (date(minutes=5), 300),
    "a date in another zone": (format_datetime((NOW + timedelta(minutes=5)).astimezone()), 300),
    "a date in the old form": ((NOW + timedelta(hours=1)).strftime("%A, %d-%b-%y %H:%M:%S GMT"), 3600),
    "two days": ("172800", 86_400),
    "a date next week": (date(days=7), 86_400),
    "zero": ("0", None),
    "negative": ("-5", None),
    "a date that has passed": (date(minutes=-5), None),
    "a time since 1970": (str(int(EPOCH) + 60), None),
    "the year 9999": ("Fri, 31 Dec 9999 23:59:59 GMT", None),
    "the end of time": ("9" * 40, None),
    "a fraction": ("1.5", None),
    "a word": ("soon", None),
    "empty": ("", None),
    "other digits": ("١٢", None),
    "half a date": ("Fri, 31", None),
    "no such date": ("Fri, 99 Foo 2030 99:99:99 GMT", None),
}


@pytest.mark.parametrize(("retry_after", "seconds"), ASKED.values(), ids=ASKED)
def test_what_a_receiver_asks_for(retry_after: str | None, seconds: float | None) -> None:
    pause = pause_asked_for(retry_after, EPOCH)
    assert pause == (None if seconds is None else timedelta(seconds=seconds))


@given(st.text(max_size=60))
def test_no_text_breaks_it(retry_after: str) -> None:
    pause = pause_asked_for(retry_after, EPOCH)
    assert pause is None or timedelta(0) < pause <= timedelta(days=1)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_done(status: int) -> None:
    assert outcome_of(status, "60", None, "thanks", EPOCH) is None


@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 422, 429, 451, 500, 502, 503, 504, 599, 999])
def test_any_other_status_leaves_it_to_the_retry_policy(status: int) -> None:
    outcome = outcome_of(status, None, None, "no", EPOCH)
    assert isinstance(outcome, Retry)
    assert outcome.due is None
    assert outcome.why is not None
    assert outcome.why.startswith(str(status))
    assert outcome.why.endswith(": no")


def test_gone_is_dead() -> None:
    outcome = outcome_of(410, "60", None, "moved out", EPOCH)
    assert isinstance(outcome, Dead)
    assert outcome.why == "410 Gone: moved out"


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_receiver_says_when(status: int) -> None:
    outcome = outcome_of(status, "90", None, "", EPOCH)
    assert isinstance(outcome, Retry)
    assert outcome.due == In(90_000)
    assert "asked to wait 90 s" in str(outcome.why)


@pytest.mark.parametrize("status", [400, 500, 302])
def test_nobody_else_does(status: int) -> None:
    outcome = outcome_of(status, "90", None, "", EPOCH)
    assert isinstance(outcome, Retry)
    assert outcome.due is None


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
def test_a_redirect_is_a_failure_that_says_so(status: int) -> None:
    outcome = outcome_of(status, None, "http://127.0.0.1/\x1b[31m", "", EPOCH)
    assert isinstance(outcome, Retry)
    assert "redirects are not followed (to http://127.0.0.1/\\x1b[31m)" in str(outcome.why)
    assert "a redirect" in str(outcome_of(status, None, None, "", EPOCH))


def test_an_excerpt_does_nothing_where_it_is_shown() -> None:
    assert inert(b"plain, and caf\xc3\xa9") == "plain, and café"
    assert inert(b"a\r\nINFO forged\x1b[2J\x00\x07") == "a\\r\\nINFO forged\\x1b[2J\\x00\\x07"
    assert inert("left\u202eright\u2028line\ufeff".encode()) == "left\\u202eright\\u2028line\\ufeff"
    assert inert(b"\xff\xfe") == "\ufffd\ufffd"
    assert len(inert(b"x" * 10_000)) == 500


@given(st.binary(max_size=600))
def test_any_bytes_become_one_printable_line(answered: bytes) -> None:
    assert inert(answered).isprintable()
