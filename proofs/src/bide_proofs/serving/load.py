"""The load: stories of tasks that are scheduled over HTTP at a rate, and some of them moved, replaced or cancelled."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec
from msgspec.structs import replace

from bide.core.instants import instant, instant_text
from bide_proofs.harness.command import PATIENCE
from bide_proofs.serving.instances import TOPIC
from bide_proofs.serving.lines import Answered, Line
from bide_proofs.serving.receiver import payload_of

LONGEST, LONGEST_MOVED = 5.0, 10.0
"""Seconds of delay, and of the delay of a task that is to be moved."""
_MOVED, _CANCELLED, _REPLACED = 0.2, 0.2, 0.05
"""The parts of the tasks that are asked to be; for some it is too late then."""
_CANCELLED_AFTER_MOVE = 0.2
_REVIVED = 0.25
"""The part of the cancelled tasks whose key is scheduled once more: a new life."""
_NEAR = 0.5
"""The part of the cancels that is asked for within 50 ms of the due time, where they race with the delivery."""
_TICK = 0.01
_MOST_UNDER_WAY = 20_000
_ATTEMPT = 10.0
"""Seconds that one instance has to answer."""
_CONNECTIONS = 64
"""To one instance."""


class _Task(msgspec.Struct):
    id: str
    token: int
    wake_at: datetime
    state: str


class _Answer(msgspec.Struct):
    """Of one verb, or an item of a batch, which may have a problem instead."""

    answer: str = ""
    task: _Task | None = None
    problem: dict[str, Any] | None = None


class _Found(msgspec.Struct):
    tasks: list[_Task]


_one = msgspec.json.Decoder(_Answer).decode
_items = msgspec.json.Decoder(list[_Answer]).decode
_found = msgspec.json.Decoder(_Found).decode


class Load:
    """What is asked of the instances at `urls`; each answer is said to `note` when it has come."""

    def __init__(self, urls: Sequence[str], note: Callable[[Line], None], seed: int) -> None:
        self.scheduled = 0
        """Stories whose first schedule was acknowledged."""
        self.lasted = 0.0
        """Seconds from the first task that was asked for to the last answer to such a one."""
        self.unanswered = 0
        """How often a call was sent again, since it was not known whether it had been done."""
        self.not_done = 0
        """How often it was sent again, since it surely had not."""
        self._urls = urls
        self._note = note
        self._chance = random.Random(seed)
        self._number = 0
        self._stories: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=_CONNECTIONS),
            timeout=aiohttp.ClientTimeout(total=_ATTEMPT),
            headers={"content-type": "application/json"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for story in self._stories:
            story.cancel()
        await asyncio.gather(*self._stories, return_exceptions=True)
        await self._session.close()

    async def run(self, seconds: float, rate: float) -> None:
        """Begin so many stories a second, for so long. What is missing at the end is still begun."""
        began, count = time.monotonic(), int(seconds * rate)
        while self._number < count:
            due = int(min(seconds, time.monotonic() - began) * rate)
            while self._number < due and len(self._stories) < _MOST_UNDER_WAY:
                self._number += 1
                story = asyncio.create_task(self._story(f"k{self._number}"))
                self._stories.add(story)
                story.add_done_callback(self._ended)
            await asyncio.sleep(_TICK)
        self.lasted = time.monotonic() - began

    async def finish(self) -> None:
        """Until every story is told."""
        while self._stories:
            await asyncio.wait(self._stories)

    def _ended(self, story: asyncio.Task[None]) -> None:
        self._stories.discard(story)
        if not story.cancelled():
            story.result()  # a defect here is not passed over

    async def left(self) -> list[str]:
        """The tasks that are not over yet, or are dead, as far as one page of each state shows."""
        found = []
        for state in ("waiting", "leased", "waiting", "dead"):  # twice: one may go back while we look
            body = await self._get(f"/v1/tasks?topic={TOPIC}&state={state}&limit=1000")
            found += [f"{task.id} is {task.state}, and wakes at {task.wake_at}" for task in _found(body).tasks]
        return list(dict.fromkeys(found))

    async def _get(self, path: str) -> bytes:
        problem: Exception | None = None
        for url in (*self._urls, *self._urls):
            try:
                async with self._session.get(url + path) as reply:
                    reply.raise_for_status()
                    return await reply.read()
            except (aiohttp.ClientError, OSError) as error:
                problem = error
        raise SystemExit(f"no instance answers GET {path}: {problem!r}")

    # --- what befalls a task

    async def _story(self, key: str) -> None:
        chance, fate = self._chance, self._chance.random()
        delay = chance.uniform(0, LONGEST_MOVED if fate < _MOVED else LONGEST)
        said = await self._schedule(key, delay)
        if said.result == "failed":
            return
        self.scheduled += 1
        if fate < _MOVED:
            await asyncio.sleep(chance.uniform(0, delay))
            said = await self._move(said)
            if chance.random() < _CANCELLED_AFTER_MOVE:
                await self._cancel(said)
        elif fate < _MOVED + _CANCELLED:
            await self._cancel(said)
        elif fate < _MOVED + _CANCELLED + _REPLACED:
            await asyncio.sleep(chance.uniform(0, delay))
            await self._replace(key)

    async def _schedule(self, key: str, delay: float) -> Answered:
        """First wins, so that sending it again is the same life: also when it is done already."""
        ask = b'{"payload":%s,"delay":"%.3fs","on_conflict":"keep"}' % (payload_of(key), delay)
        return await self._ask("schedule", key, "PUT", _path(key), ask)

    async def _replace(self, key: str) -> Answered:
        """Each sending is a life of its own. A POST, which the client never sends again by itself."""
        delay = self._chance.uniform(0, LONGEST)
        ask = b'[{"topic":"%s","key":"%s","payload":%s,"delay":"%.3fs"}]'
        return await self._ask(
            "replace", key, "POST", "/v1/schedule", ask % (TOPIC.encode(), key.encode(), payload_of(key), delay)
        )

    async def _move(self, said: Answered) -> Answered:
        """Earlier or later. Sending it again cannot mean another time: it names the instant, or the token."""
        earlier = self._chance.random() < 0.5
        delay = self._chance.uniform(0, 1) if earlier else self._chance.uniform(1, LONGEST_MOVED / 2)
        earliest = time.time_ns() // 1_000_000 + int(delay * 1000)
        if self._chance.random() < 0.5:
            ask: dict[str, object] = {"at": instant_text(earliest)}
        else:
            ask = {"delay": f"{delay:.3f}s", "if_token": said.token}
        return await self._ask("move", said.key, "PATCH", _path(said.key), msgspec.json.encode(ask), earliest)

    async def _cancel(self, said: Answered) -> None:
        """At a random moment, or about when it is due."""
        ahead = max(said.wake_at / 1000 - time.time(), 0.0)
        near = self._chance.random() < _NEAR
        moment = ahead + self._chance.uniform(-0.05, 0.05) if near else self._chance.uniform(0, ahead)
        await asyncio.sleep(max(moment, 0.0))
        answer = await self._ask("cancel", said.key, "DELETE", _path(said.key), None)
        if answer.result == "cancelled" and self._chance.random() < _REVIVED:
            await self._replace(said.key)

    # --- calls

    async def _ask(
        self, verb: str, key: str, method: str, path: str, ask: bytes | None, asked_for: int = 0
    ) -> Answered:
        """Of either instance, and of the other as long as there is no answer."""
        asked_at, unanswered = time.monotonic_ns(), 0
        place, problem = self._chance.randrange(len(self._urls)), ""
        while time.monotonic_ns() < asked_at + PATIENCE * 1e9:
            try:
                async with self._session.request(method, self._urls[place] + path, data=ask) as reply:
                    status, body = reply.status, await reply.read()
            except aiohttp.ClientConnectorError as error:
                maybe_done, problem = False, repr(error)
            except (aiohttp.ClientError, OSError) as error:
                maybe_done, problem = True, repr(error)
            else:
                at = time.monotonic_ns()
                answer, status, problem = _answer(status, body, batch=method == "POST")
                if answer is not None:
                    said = replace(_said(verb, key, asked_at, at, unanswered, answer), asked_for=asked_for)
                    self._note(said)
                    return said
                if status < HTTPStatus.INTERNAL_SERVER_ERROR:
                    break
                maybe_done = status not in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.INSUFFICIENT_STORAGE)
            unanswered += maybe_done
            self.unanswered += maybe_done
            self.not_done += not maybe_done
            place = (place + 1) % len(self._urls)
            await asyncio.sleep(self._chance.uniform(0.01, 0.1))
        said = Answered(verb, key, asked_at, time.monotonic_ns(), "failed", unanswered, error=problem)
        self._note(said)
        return said


def _path(key: str) -> str:
    return f"/v1/topics/{TOPIC}/tasks/{key}"


def _answer(status: int, body: bytes, *, batch: bool) -> tuple[_Answer | None, int, str]:
    """The answer; without one the status, of the item where it is a batch of one, and what was said."""
    try:
        if batch and status == HTTPStatus.OK:
            (item,) = _items(body)
        else:
            item = _one(body)
    except (msgspec.DecodeError, ValueError) as error:
        return None, status, f"{status} with {body[:200]!r}: {error}"
    if item.answer:
        return item, status, ""
    problem = item.problem
    return None, status if problem is None else int(problem["status"]), f"{status} {body.decode()[:500]}"


def _said(verb: str, key: str, asked_at: int, at: int, unanswered: int, answer: _Answer) -> Answered:
    task = answer.task
    if task is None:
        return Answered(verb, key, asked_at, at, answer.answer, unanswered)
    result = answer.answer if answer.answer != "finished" else f"finished ({task.state})"
    return Answered(
        verb, key, asked_at, at, result, unanswered, task.id, task.token, instant(task.wake_at),
        task.state == "waiting",
    )  # fmt: skip
