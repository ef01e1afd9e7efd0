"""Answers of a service, damaged on the way, as the HTTP store reads them.

Each call comes back with what it promises, or with an error of bide's: an answer that cannot be read is asked for
again, and then its outcome is unknown. No other exception, and nothing without an end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bide.core.answers import Answer
from bide.core.errors import BideError
from bide.core.names import new_id
from bide.core.records import (
    At,
    Filter,
    Found,
    Lease,
    Leased,
    NewTask,
    Page,
    Record,
    Ref,
    Result,
    Settlement,
    State,
    Verdict,
)
from bide.engine.clock import SystemClock
from bide.engine.history import MINUTE, Past, Row, rows_between
from bide.ports import wire
from bide.stores.http import HttpStore
from bide.stores.http import store as http_store
from bide.stores.http.link import Link, Reply
from bide.testing.clock import FIRST_INSTANT as NOW
from bide_proofs.fuzz.drawing import Draw
from bide_proofs.fuzz.running import Case, Target, check, clear

_KINDS = (wire.CONTENT_TYPE, wire.CONTENT_TYPE, "application/problem+json", "application/json", "text/html", "")
_RECORD = Record(
    "t", "k", new_id(), None, State.LEASED, NOW, NOW, NOW, 1, 0, 0, 5, "w", b"{}", b"", None, None, NOW, None, None
)
_OPERATIONS = (
    "add",
    "settle",
    "extend",
    "get",
    "find",
    "tally",
    "lease",
    "purge",
    "announce",
    "events",
    "paused",
    "minutes",
    "time",
)


class DamagedLink(Link):
    """Answers by itself: with what a service would say, damaged as the case has it."""

    draw: Draw
    opens = True

    async def post(self, operation: str, body: bytes, silence: float) -> Reply:
        if operation == "open" and self.opens:
            return Reply(200, wire.CONTENT_TYPE, wire.encode(_welcome()))
        reply = _reply(self.draw, operation)
        self.draw.note(reply)
        return reply


def _welcome() -> wire.Welcome:
    return wire.Welcome(service=wire.SERVICE, wire=wire.WIRE, session="s", micros=NOW * 1000)


def _sound(draw: Draw, operation: str) -> Any:
    """What a service answers to the calls below."""
    leased = Leased([_RECORD], NOW + 5, NOW)
    return {
        "add": [Answer(Result.CREATED, _RECORD)], "settle": [True], "extend": [True], "get": [_RECORD, None],
        "find": Found([_RECORD], draw.of(None, "cursor")), "tally": wire.FlatTally([("t", State.DEAD, 3, True)], {}),
        "lease": leased, "purge": 3, "announce": {"w": ["t"]}, "events": [], "paused": [], "time": None,
        "minutes": {NOW // MINUTE: Row(1, {"t": Past(1, 1)})},
    }.get(operation)  # fmt: skip


def _reply(draw: Draw, operation: str) -> Reply:
    if operation == "open":
        body = wire.encode(_welcome())
    elif draw.chance(0.2):
        failure = wire.Failure(
            draw.of("bad_input", "corrupt", "full", "session", "forgotten", "odd", "refused", "setup"),
            "why",
            "field",
            "v",
            "x",
        )
        body = wire.encode(failure)
    else:
        inner = wire.encode(_sound(draw, operation))
        if draw.chance(0.6):
            inner = draw.bytes(inner) if draw.chance(0.9) else b"\x91" * 5_000 + b"\x01"
        failed = {draw.of(0, 1, -1, 99): wire.Failure("corrupt", "why")} if draw.chance(0.1) else {}
        try:
            body = wire.encode(wire.Success(NOW * 1000, msgspec.Raw(inner or b"\xc0"), failed))
        except msgspec.MsgspecError:
            body = inner
    if draw.chance(0.3):
        body = draw.bytes(body)
    kind = wire.CONTENT_TYPE if draw.chance(0.8) else draw.choice(_KINDS)
    status = draw.of(200, 200, 200, 200, 409, 422, 503, 500, 507, 401, 403, 413, 429, 301, 404, 204)
    if kind == "application/problem+json":
        body = draw.bytes(b'{"title":"a","detail":"b"}')
    return Reply(status, kind, body)


async def asked(store: HttpStore, operation: str) -> None:
    """One call; what comes back is what it promises."""
    if operation == "add":
        answers = await store.add([NewTask("t", "k", new_id(), At(NOW), b"{}")], now=NOW)
        check(len(answers) == 1 and type(answers[0]) is Answer, f"{answers}")
    elif operation == "settle":
        settled = await store.settle([Settlement("t", "k", 5, Verdict.DONE)], now=NOW)
        check(len(settled) == 1 and type(settled[0]) is bool, f"{settled}")
    elif operation == "extend":
        extended = await store.extend([Lease("t", "k", 5)], now=NOW, until=NOW + 5)
        check(len(extended) == 1 and type(extended[0]) is bool, f"{extended}")
    elif operation == "get":
        got = await store.get([Ref("t", "k"), Ref("t", "l")])
        check(len(got) == 2, f"{len(got)} of 2")
    elif operation == "find":
        check(type((await store.find(Filter(), Page(limit=5))).tasks) is list, "tasks")
    elif operation == "tally":
        (await store.tally()).number()
    elif operation == "lease":
        leased = await store.lease({"t": 3}, now=NOW, until=NOW + 5, holder="w")
        check(all(type(one) is Record for one in leased.tasks), "tasks")
    elif operation == "purge":
        check(type(await store.purge(now=NOW, limit=5)) is int, "a number")
    elif operation == "announce":
        await store.announce("w", ["t"], NOW, now=NOW)
    elif operation == "events":
        await store.events()
    elif operation == "paused":
        await store.paused()
    elif operation == "minutes":
        await rows_between(store, SystemClock(), NOW // MINUTE, NOW // MINUTE)
    else:
        await store.time()


async def case(store: HttpStore, link: DamagedLink, draw: Draw) -> None:
    link.draw, link.opens = draw, draw.chance(0.9)
    calls = store._open().calls
    calls._session, calls.body_limit, calls.most = "s", 1 << 20, 1_000
    operation = draw.choice(_OPERATIONS)
    draw.note(operation)
    try:
        if draw.chance(0.1):
            link.opens = False
            await calls._begin()
        else:
            await asked(store, operation)
        draw.count("answered")
    except BideError as error:
        clear(error) if type(error).__name__ not in ("BadInput", "BadPayload") else check(str(error), "what is wrong")
        draw.count(type(error).__name__)
    except Exception as error:
        # what the calls handle between themselves, of opening
        if type(error).__name__ not in ("NotSent", "Lost", "TooLarge") or link.opens:
            raise


@asynccontextmanager
async def opened(_: Path) -> AsyncIterator[Case]:
    """A store whose link answers by itself; with little patience, since a bad answer is asked for again."""
    store = HttpStore("http://127.0.0.1:1", patience=0.03, silence=0.02)
    made: list[DamagedLink] = []

    def link_of(*given: Any) -> DamagedLink:
        made.append(DamagedLink(*given))
        made[-1].draw = Draw("open")
        return made[-1]

    before = vars(http_store)["Link"]
    vars(http_store)["Link"] = link_of
    try:
        await store.open()
    finally:
        vars(http_store)["Link"] = before
    try:
        yield partial(case, store, made[0])
    finally:
        await store.close()


TARGETS = (Target("answers", "answers of a service, damaged, as the HTTP store reads them", opened, weight=2.0),)
