"""Payloads: what goes in comes out, of its declared type; everything else is refused by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, Generic, NamedTuple, TypedDict, TypeVar

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bide.core.errors import BadInput, BadPayload
from bide.core.payloads import PAYLOAD_LIMIT, checker_for, decode_json, decoder_for, encode_payload


class Order(msgspec.Struct):
    number: int


@dataclasses.dataclass
class Meal:
    number: int


class Ride(pydantic.BaseModel):
    number: int


@dataclasses.dataclass
class Trip:
    back: Ride


class Parcel(pydantic.BaseModel):
    number: int = pydantic.Field(alias="parcelNumber")


class Toll(pydantic.BaseModel, extra="forbid"):
    number: int

    @pydantic.computed_field
    def twice(self) -> int:
        return 2 * self.number


class Coupon(TypedDict):
    number: int


numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(json_values)
def test_plain_values_survive(value: Any) -> None:
    assert decode_json(encode_payload(value)) == value


@given(st.binary())
def test_bytes_pass_through_untouched(value: bytes) -> None:
    for given_as in (value, bytearray(value), memoryview(value)):
        encoded = encode_payload(given_as)
        assert type(encoded) is bytes
        assert decoder_for(bytes)(encoded) == value


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (Order, Order(42)), (Meal, Meal(42)), (Ride, Ride(number=42)),
        (Parcel, Parcel(parcelNumber=42)), (Toll, Toll(number=42)), (Coupon, {"number": 42}),
        (list[Order], [Order(1), Order(2)]), (Order | None, None), (dict[str, int], {"a": 1}), (int, 42), (str, "42"),
        (None, None), (Ride | None, Ride(number=42)), (list[Parcel], [Parcel(parcelNumber=42)]),
        (dict[str, Toll], {"a": Toll(number=42)}), (Trip, Trip(Ride(number=42))),
    ],
)  # fmt: skip
def test_declared_types_survive(declared: Any, value: Any) -> None:
    checker_for(declared)(value)
    assert decoder_for(declared)(encode_payload(value)) == value


T = TypeVar("T")


@dataclasses.dataclass
class Bag:
    weight: Annotated[int, pydantic.Field(gt=0)]
    inner: Bag | None = None
    seal: bytes = b"\xff"


class Point(NamedTuple):
    x: pydantic.PositiveInt


@pydantic.dataclasses.dataclass
class Stamp(Generic[T]):
    number: int = pydantic.Field(alias="stampNumber")
    label: bytes = b"x"

    @pydantic.field_validator("number")
    @classmethod
    def positive(cls, number: int) -> int:
        assert number > 0
        return number


@pytest.mark.parametrize(
    ("declared", "good", "bad"),
    [
        (Ride | int, [Ride(number=42), 42], "42 rides"),
        (list[Ride | str], [["1", Ride(number=2)]], [1]),
        (pydantic.PositiveInt, [1], -1),
        (Bag | None, [Bag(1, Bag(2, seal=b"\xff\xfe")), None], Bag(1, Bag(0))),
        (dict[str, Ride | bytes], [{"a": b"??>", "b": Ride(number=2)}], {"a": 1}),
        (Bag, [Bag(1, Bag(2))], Bag(0)),
        (Point, [Point(1)], Point(0)),
        (Stamp, [Stamp(stampNumber=1)], {"stampNumber": 0}),
        (list[Stamp[int]] | None, [None, []], [{"stampNumber": 0}]),
    ],
)
def test_pydantic_reads_constraints_dataclasses_and_unions_with_a_model(
    declared: Any, good: list[Any], bad: Any
) -> None:
    for value in good:
        assert decoder_for(declared)(encode_payload(value)) == value
    with pytest.raises(BadPayload):
        checker_for(declared)(bad)


class Note:
    """As a model of another library than pydantic may be."""

    def model_dump_json(self, **_: object) -> str:
        return "null"


def test_the_two_methods_are_enough_for_a_model() -> None:
    assert encode_payload(Note()) == b"null"


@pytest.mark.parametrize("declared", [Order, Meal, Ride, Coupon])
def test_a_plain_dict_of_the_right_shape_is_read_as_the_declared_type(declared: Any) -> None:
    checker_for(declared)({"number": 42})
    assert decoder_for(declared)(encode_payload({"number": 42})) == (
        {"number": 42} if declared is Coupon else declared(number=42)
    )


@pytest.mark.parametrize("declared", [Order, Meal, Ride, Coupon, int, list[Order], list[Ride], dict[str, bool]])
@pytest.mark.parametrize("value", [{"number": "many"}, {"nummer": 42}, "42", [1], None, object()])
def test_a_wrong_payload_fails_in_the_caller(declared: Any, value: Any) -> None:
    with pytest.raises(BadPayload) as caught:
        checker_for(declared)(value)
    assert caught.value.field == "payload"


def test_a_wrong_field_in_the_right_type_fails_in_the_caller_too() -> None:
    with pytest.raises(BadPayload, match="Order"):
        checker_for(Order)(Order("many"))  # type: ignore[arg-type]


def test_without_a_declared_type_anything_is_accepted() -> None:
    for declared in (Any, bytes):
        for value in (1, "x", {"a": [None]}, b"\x00"):
            checker_for(declared)(value)


@pytest.mark.parametrize("damaged", [b"", b"\xff\xfe", b"{", b'{"number": }', b"[" * 100_000, b"nul", b'"\xff"'])
@pytest.mark.parametrize("declared", [Any, Order, Meal, Ride])
def test_damaged_bytes_are_a_bad_payload(declared: Any, damaged: bytes) -> None:
    with pytest.raises(BadPayload) as caught:
        decoder_for(declared)(damaged)
    assert len(str(caught.value)) < 1000, "what is stored as the error stays short"


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


class Stubborn:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Odd(pydantic.BaseModel):
    model_config = {"arbitrary_types_allowed": True}
    thing: Any


@pytest.mark.parametrize(
    "make",
    [endless, deep, object, Stubborn, lambda: {(1, 2): 3}, lambda: "\ud800", lambda: 1j, lambda: Odd(thing=object())],
)
def test_what_json_cannot_hold_is_refused(make: Any) -> None:
    with pytest.raises(BadPayload, match="what JSON can hold"):
        encode_payload(make())


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("make", [lambda bad: {"a": [None, bad]}, lambda bad: Odd(thing={"a": (None, bad)})])
def test_a_number_that_json_cannot_hold_is_named(make: Any, number: float) -> None:
    with pytest.raises(BadPayload, match=r"a\[1\]: .* a finite number"):
        encode_payload(make(number))


def test_a_null_beside_what_json_can_hold_is_accepted() -> None:
    """No number is refused for bytes that look like NaN, or beside a value of which MessagePack knows nothing."""
    payload = {"a": None, "huge": 2**70, "raw": msgspec.Raw(b"[1]"), "b": b"\xcb\x7f\xff"}
    assert decode_json(encode_payload(payload)) == {"a": None, "huge": 2**70, "raw": [1], "b": "y3//"}
    with pytest.raises(BadPayload, match=r"payload\.huge"):
        encode_payload({"huge": [2**70, math.nan]})


def test_the_limit_is_in_bytes_and_exact() -> None:
    assert len(encode_payload(b"x" * PAYLOAD_LIMIT)) == PAYLOAD_LIMIT
    with pytest.raises(BadPayload, match=f"{PAYLOAD_LIMIT + 1} bytes"):
        encode_payload(b"x" * (PAYLOAD_LIMIT + 1))
    assert encode_payload("é" * 4, 10) == '"éééé"'.encode()
    with pytest.raises(BadPayload, match="at most 9 bytes"):
        encode_payload("é" * 4, 9)
    assert issubclass(BadPayload, BadInput)
