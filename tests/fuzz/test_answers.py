"""Answers of a service, damaged on the way, as the HTTP store reads them.

Each call comes back with what it promises, or with an error of bide's: an answer that cannot be read is asked for
again, and then its outcome is unknown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st
from tests.fuzz.cases import damaged, fuzz, mostly, near_bytes, refusals
from tests.fuzz.conftest import Loop
from tests.fuzz.tasks import made

from bide.core.answers import Answer
from bide.core.errors import BideError, OutcomeUnknown, StoreError, StoreUnavailable
from bide.core.instants import At
from bide.core.names import new_id
from bide.core.records import (
    Filter,
    Found,
    Lease,
    Leased,
    NewTask,
    OutcomeKind,
    Page,
    Record,
    Ref,
    Result,
    Settlement,
    State,
)
from bide.engine.history import MINUTE, DeliveryCounts, MinuteRow, rows_between
from bide.ports import SystemClock, remote
from bide.stores.http import HttpStore, calls
from bide.stores.http import store as http_store
from bide.stores.http.calls import Reply, Transport
from bide.testing.clock import FIRST_INSTANT as NOW

RECORD = made({"state": State.LEASED, "holder": "w", "token": 5})
WELCOME = remote.encode(remote.Welcome(service=remote.SERVICE, wire=remote.WIRE, session="s", micros=NOW * 1000))
SOUND = Reply(200, remote.CONTENT_TYPE, WELCOME)
FAILURE = remote.Failure("corrupt", "why")
DEEP = b"\x91" * 5_000 + b"\x01"


class Says(Transport):
    """Answers by itself, without a service."""

    reply: Callable[[str], Reply]

    async def post(self, operation: str, body: bytes, silence: float) -> Reply:
        return Says.reply(operation)


@pytest.fixture(autouse=True, scope="module")
def impatient() -> Iterator[None]:
    """Nobody waits for a better answer to come."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_store, "Transport", Says)
        patch.setattr(calls, "_AT_FIRST", 0.0)
        yield


async def asked(reply: Callable[[str], Reply], act: Callable[[HttpStore], Awaitable[Any]]) -> Any:
    """What a call comes to whose service says that."""
    Says.reply = staticmethod(reply)
    store = HttpStore("http://127.0.0.1:1", patience=0.02, silence=0.02)
    await store.open()
    try:
        return await act(store)
    finally:
        await store.close()


def of_kind(kind: type[object]) -> Callable[[Any], bool]:
    return lambda answers: len(answers) == 1 and type(answers[0]) is kind


def anything(_: Any) -> bool:
    return True


FOUND = Found([RECORD], "cursor")
CALLS: dict[str, tuple[Any, Callable[[HttpStore], Awaitable[Any]], Callable[[Any], bool]]] = {
    "add": ([Answer(Result.CREATED, RECORD)], lambda one: one.add([NewTask("t", "k", new_id(), At(NOW))], now=NOW),
            of_kind(Answer)),
    "settle": ([True], lambda one: one.settle([Settlement("t", "k", 5, OutcomeKind.DONE)], now=NOW), of_kind(bool)),
    "extend": ([True], lambda one: one.extend([Lease("t", "k", 5)], now=NOW, until=NOW + 5), of_kind(bool)),
    "get": ([RECORD, None], lambda one: one.get([Ref("t", "k"), Ref("t", "l")]), lambda got: len(got) == 2),
    "find": (FOUND, lambda one: one.find(Filter(), Page(limit=5)), lambda found: type(found.tasks) is list),
    "tally": (remote.FlatTally([("t", State.DEAD, 3, True)], {}), lambda one: one.tally(),
              lambda tally: tally.number() is not None),
    "lease": (Leased([RECORD], {"t": NOW + 5}, NOW),
              lambda one: one.lease({"t": 3}, now=NOW, until=NOW + 5, holder="w"),
              lambda leased: all(type(one) is Record for one in leased.tasks)),
    "purge": (3, lambda one: one.purge(now=NOW, limit=5), lambda number: type(number) is int),
    "announce": ({"w": ["t"]}, lambda one: one.announce("w", ["t"], NOW, now=NOW), anything),
    "events": ([], lambda one: one.events(), anything),
    "paused": ([], lambda one: one.paused(), anything),
    "minutes": ({NOW // MINUTE: MinuteRow(1, {"t": DeliveryCounts(1, 1)})},
                lambda one: rows_between(one, SystemClock(), NOW // MINUTE, NOW // MINUTE), anything),
    "time": (None, lambda one: one.time(), anything),
}  # fmt: skip
"""By operation: what a service says, the call, and what it promises."""
KINDS = mostly(
    st.just(remote.CONTENT_TYPE), st.sampled_from(["application/problem+json", "application/json", "text/html", ""]), 7
)
STATUSES = mostly(
    st.just(200), st.sampled_from([409, 422, 503, 500, 507, 401, 403, 413, 429, 301, 404, 204]), 6
)  # fmt: skip
FAILURES = st.builds(
    remote.Failure,
    st.sampled_from(["bad_input", "corrupt", "full", "session", "forgotten", "odd", "refused", "setup"]),
    *map(st.just, ("why", "field", "v", "x")),
)


def told(answer: bytes, failed: dict[int, remote.Failure] | None = None) -> bytes:
    try:
        return remote.encode(remote.Success(NOW * 1000, msgspec.Raw(answer or b"\xc0"), failed or {}))
    except msgspec.MsgspecError:
        return answer


def bodies(operation: str) -> st.SearchStrategy[bytes]:
    if operation == "open":
        return damaged(WELCOME)
    inner = remote.encode(CALLS[operation][0])
    failed = st.dictionaries(st.sampled_from([0, 1, -1, 99]), st.just(FAILURE), max_size=1)
    sound = st.builds(told, mostly(near_bytes(inner), st.just(DEEP)), mostly(st.none(), failed))
    return mostly(sound | sound.flatmap(damaged), FAILURES.map(remote.encode))


def replies(operation: str) -> st.SearchStrategy[Reply]:
    problems = near_bytes(b'{"title":"a","detail":"b"}')
    return st.builds(Reply, STATUSES, KINDS, mostly(bodies(operation), problems))


SAID = st.sampled_from(list(CALLS)).flatmap(
    lambda operation: st.tuples(
        st.just(operation),
        st.lists(replies(operation), min_size=1, max_size=3),
        st.lists(replies("open"), min_size=1, max_size=2).map(lambda odd: [SOUND, *odd]) | st.lists(replies("open")),
    )
)
"""An operation, and what is answered to it and to those that open a session, one after the other; the last goes on."""


@fuzz(150, said=SAID)
def test_answers(loop: Loop, said: tuple[str, list[Reply], list[Reply]]) -> None:
    operation, answers, welcomes = said

    def reply(of: str) -> Reply:
        left = welcomes if of == "open" else answers
        return left.pop(0) if len(left) > 1 else left[0] if left else SOUND

    _, act, promised = CALLS[operation]
    with refusals(BideError, ours=False):
        assert promised(loop.finish(asked(reply, act)))


# --- what was found


ADDING, FINDING = CALLS["add"][1], CALLS["find"][1]


def saying(reply: Reply) -> Callable[[str], Reply]:
    return lambda operation: SOUND if operation == "open" else reply


@pytest.mark.parametrize("body", [told(DEEP), told(b"\x91\xc0"), told(b"\x91\xc0", {7: FAILURE}), DEEP])
def test_an_answer_that_cannot_be_read_leaves_the_outcome_unknown(loop: Loop, body: bytes) -> None:
    with pytest.raises(OutcomeUnknown):
        loop.finish(asked(saying(Reply(200, remote.CONTENT_TYPE, body)), ADDING))


@pytest.mark.parametrize("reply", [Reply(200, remote.CONTENT_TYPE, DEEP), Reply(413, "text/html", b"")])
def test_a_page_that_cannot_be_had_is_an_error_of_the_store(loop: Loop, reply: Reply) -> None:
    with pytest.raises(StoreError) as caught:
        loop.finish(asked(saying(reply), FINDING))
    assert isinstance(caught.value, StoreUnavailable) or "more bytes" in str(caught.value)
