"""Answers that fuzzing found the HTTP store to end on with another error than one of bide's."""

from __future__ import annotations

import msgspec
import pytest

from bide.core.errors import BideError, OutcomeUnknown, StoreError, StoreUnavailable
from bide.core.names import new_id
from bide.core.records import At, Filter, NewTask, Page
from bide.ports import wire
from bide.stores.http import HttpStore
from bide.stores.http import store as http_store
from bide.stores.http.link import Link, Reply
from bide.testing.clock import FIRST_INSTANT as NOW

WELCOME = wire.encode(wire.Welcome(service=wire.SERVICE, wire=wire.WIRE, session="s", micros=NOW * 1000))


def told(answer: bytes, failed: dict[int, wire.Failure] | None = None) -> Reply:
    return Reply(200, wire.CONTENT_TYPE, wire.encode(wire.Success(NOW * 1000, msgspec.Raw(answer), failed or {})))


async def store_told(reply: Reply, monkeypatch: pytest.MonkeyPatch) -> HttpStore:
    """A store whose service says that, whatever it is asked."""

    class Says(Link):
        async def post(self, operation: str, body: bytes, silence: float) -> Reply:
            return Reply(200, wire.CONTENT_TYPE, WELCOME) if operation == "open" else reply

    monkeypatch.setattr(http_store, "Link", Says)
    store = HttpStore("http://127.0.0.1:1", patience=0.05, silence=0.05)
    await store.open()
    return store


DEEP = b"\x91" * 5_000 + b"\x01"
FAILURE = wire.Failure("corrupt", "why")


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (told(DEEP), OutcomeUnknown),
        (told(b"\x91\xc0"), OutcomeUnknown),
        (told(b"\x91\xc0", {7: FAILURE}), OutcomeUnknown),
        (Reply(200, wire.CONTENT_TYPE, DEEP), OutcomeUnknown),
    ],
)
async def test_an_answer_that_cannot_be_read_leaves_the_outcome_unknown(
    reply: Reply, kind: type[BideError], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await store_told(reply, monkeypatch)
    try:
        with pytest.raises(kind):
            await store.add([NewTask("t", "k", new_id(), At(NOW))], now=NOW)
    finally:
        await store.close()


@pytest.mark.parametrize("reply", [Reply(200, wire.CONTENT_TYPE, DEEP), Reply(413, "text/html", b"")])
async def test_a_page_that_cannot_be_had_is_an_error_of_the_store(
    reply: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await store_told(reply, monkeypatch)
    try:
        with pytest.raises(StoreError) as caught:
            await store.find(Filter(), Page())
        assert isinstance(caught.value, StoreUnavailable) or "more bytes" in str(caught.value)
    finally:
        await store.close()
