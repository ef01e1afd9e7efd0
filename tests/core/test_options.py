"""Options: a policy and headers, as bytes that no store need understand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.core.errors import BadInput
from bide.core.options import LONGEST_HEADERS, NO_OPTIONS, decode_options, encode_options
from bide.core.retry import Fixed, Ladder

printable = st.text(st.characters(exclude_categories=("C", "Z")), max_size=20)


def test_nothing_is_no_bytes_at_all() -> None:
    assert encode_options(None, None) == b""
    assert encode_options(None, {}) == b""
    assert decode_options(b"") is NO_OPTIONS


@given(
    st.one_of(st.none(), st.just(Ladder("1s", "5m")), st.just(Fixed("1s", tries=3))),
    st.dictionaries(printable.filter(bool), printable, max_size=10),
)
def test_options_survive_their_bytes(retry: Any, headers: dict[str, str]) -> None:
    options = decode_options(encode_options(retry, headers))
    assert options.retry == retry
    assert options.headers == headers


@pytest.mark.parametrize(
    "headers", [{"": "x"}, {"a": "b\nc"}, {"a\r": "b"}, {"a": 5}, {5: "a"}, {"a": None}, {"a": "\ud800"}, ["a"], "a=b"]
)
def test_headers_that_are_not_short_text_are_refused(headers: Any) -> None:
    with pytest.raises(BadInput) as caught:
        encode_options(None, headers)
    assert caught.value.field == "headers"


def test_headers_have_a_limit() -> None:
    assert encode_options(None, {"a": "x" * (LONGEST_HEADERS - 50)})
    with pytest.raises(BadInput, match=f"at most {LONGEST_HEADERS} bytes"):
        encode_options(None, {"a": "x" * LONGEST_HEADERS})


def test_fields_of_a_newer_version_are_passed_over() -> None:
    newer = msgspec.msgpack.encode({"headers": {"a": "b"}, "colour": "blue"})
    assert decode_options(newer).headers == {"a": "b"}


def policy_of(**terms: Any) -> bytes:
    return msgspec.msgpack.encode({"retry": terms})


GROWING = {"policy": "exponential", "first": 1, "factor": 2.0, "longest": 5, "tries": 3, "jitter": 0.2}


@pytest.mark.parametrize(
    "damaged",
    [
        b"\xc1", b"\x81", b"hello", b"\x92\x01\x02", b"\x81\xa5retry\x05",
        b"\x81\xa7headers\x81\xa1a\xa1\xff",  # a header that is no UTF-8
        b"\x81\xa1x" + b"\x91" * 5_000 + b"\x01",
        *(policy_of(**(GROWING | {name: value})) for name, value in (
            ("jitter", float("inf")), ("jitter", -1.0), ("factor", float("nan")), ("factor", 1e300), ("first", -1),
            ("longest", 2**62), ("tries", 0),
        )),
        policy_of(policy="fixed", pause=-5, tries=3),
        policy_of(policy="ladder", rungs=[]),
        policy_of(policy="ladder", rungs=[1, 2**60]),
    ],
)  # fmt: skip
def test_damaged_options_are_one_known_error(damaged: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_options(damaged)
