"""The sink that posts a task to a URL, and reads the outcome off the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from io import BytesIO
from time import perf_counter
from typing import TYPE_CHECKING, Any

import aiohttp
from msgspec import DecodeError

from bide.core.errors import BadInput
from bide.core.instants import Length, duration
from bide.core.options import decode_options
from bide.core.outcomes import Dead, Defer, Outcome, Retry
from bide.core.records import Record
from bide.core.tasks import Task
from bide.sinks.trace_headers import trace_headers
from bide.sinks.webhook.answers import inert, outcome_of
from bide.sinks.webhook.guard import Target
from bide.sinks.webhook.results import WebhookResult
from bide.sinks.webhook.sending import (
    WAY,
    Way,
    beginning_of,
    content_type,
    header_text,
    own_headers,
    topic_text,
    well_formed,
    what_failed,
)
from bide.sinks.webhook.signing import Signer

if TYPE_CHECKING:
    from bide.sinks.webhook.post import WebhookPost

URL_HEADER = "webhook"
"""The header of a task that names its URL, where the route is per task."""
_SLOTS_PER_HOST = 5
_NOTHING_TOLD: Mapping[str, str] = {}
_LARGE = 2**20
"""Bytes; aiohttp wants larger bodies as a file, so that it can send them in parts."""


class WebhookSink:
    """Posts the payload to a URL. Made by `WebhookPost.sink`.

    2xx is Done and 410 Dead; every other answer, and none, is Retry, after the time that a 429 or 503 asks for. A URL
    that must not be called is Dead. A host that has no place free gets the task later: Defer.
    """

    __slots__ = ("_connect", "_per_task", "_post", "_signer", "_static", "_target", "_timeout", "_total")

    def __init__(
        self,
        post: WebhookPost,
        url: str | None,
        *,
        per_task: bool,
        secrets: Sequence[str],
        connect: Length,
        total: Length,
        headers: Mapping[str, str],
    ) -> None:
        if per_task is (url is not None):
            raise BadInput("url, per_task", (url, per_task), "one of the two: a URL for all tasks, or one for each")
        self._post = post
        self._per_task = per_task
        self._target = None if url is None else post.guard.target(url)
        self._signer = Signer(secrets)
        self._connect, self._total = _seconds(connect, "connect"), _seconds(total, "total")
        self._timeout = aiohttp.ClientTimeout(total=self._total, connect=self._connect)
        self._static = {"user-agent": post.agent, "accept": "*/*", "accept-encoding": "identity"} | own_headers(headers)

    @property
    def concurrency(self) -> int:
        """What suits a route of this sink: the places of its one host; with a URL per task, those of five hosts."""
        return self._post.per_host * (_SLOTS_PER_HOST if self._per_task else 1)

    def described(self) -> tuple[str, str]:
        """What it is, for whoever looks at its topic. No more of the URL than its host: the rest may be a secret."""
        return "webhook", "" if self._target is None else self._target.host

    async def deliver(self, task: Task[Any]) -> Outcome | None:
        record, began, post = task.record, perf_counter(), self._post
        hosts = post.hosts
        try:
            target = self._target or self._own_target(record)
        except BadInput as error:
            return self._over(record, began, None, Dead(inert(str(error).encode())))
        place = hosts.enter(target.host) or await hosts.wait(target.host)
        if place is None:
            pause = timedelta(seconds=hosts.pause(target.host))
            return self._over(record, began, target, Defer(pause))
        answered: bool | None = None
        status, told, begin, way = 0, _NOTHING_TOLD, b"", Way()
        try:
            response = await self._send(task, target, way)
            answered = True
            status, told = response.status, response.headers
            begin = await beginning_of(response)
        except aiohttp.ClientResponseError as error:  # the status decides, also where the rest cannot be read
            answered = way.status is not None
            if way.status is None:
                return self._over(record, began, target, Retry(what_failed(error, target.host, 0, 0)))
            status = way.status
        except (aiohttp.ClientError, OSError) as error:
            answered = False
            why = what_failed(error, target.host, self._connect, self._total)
            return self._over(record, began, target, Retry(why))
        finally:
            place.leave(answered)
        if 200 <= status < 300:
            if post.observe is not None:
                self._over(record, began, target, None, status, inert(begin))
            return None
        excerpt = inert(begin)
        asked, where, date = told.get("Retry-After"), told.get("Location"), told.get("Date")
        outcome = outcome_of(status, asked, where, excerpt, post.now(), date)
        return self._over(record, began, target, outcome, status, excerpt)

    def _own_target(self, record: Record) -> Target:
        try:
            url = decode_options(record.options).headers.get(URL_HEADER)
        except DecodeError as error:
            raise BadInput("headers", f"({error})", "headers that are not damaged") from None
        field = f"headers[{URL_HEADER}]"
        if url is None:
            raise BadInput(field, None, "the URL that this task is to be posted to")
        return self._post.target(url, field)

    async def _send(self, task: Task[Any], target: Target, way: Way) -> aiohttp.ClientResponse:
        """Once more at once, on a new connection, where one that had been used before broke before any answer: the
        receiver closed it as the request was on its way. What it does twice has the same `webhook-id`."""
        began = perf_counter()
        headers = self._headers(task)
        try:
            return await self._post_once(task, target, headers, way, self._timeout)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            left = self._total - (perf_counter() - began)
            if not (way.reused and way.silent) or left <= 0:
                raise
        timeout = aiohttp.ClientTimeout(total=left, connect=self._connect)
        again = Way(fresh=True)
        try:
            return await self._post_once(task, target, headers, again, timeout)
        finally:
            way.follow(again)

    async def _post_once(
        self, task: Task[Any], target: Target, headers: dict[str, str], way: Way, timeout: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        payload = task.record.payload
        token = WAY.set(way)
        try:
            return await self._post.session(trusted=target.trusted).post(
                target.url,
                data=payload if len(payload) <= _LARGE else BytesIO(payload),
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            )
        finally:
            WAY.reset(token)

    def _headers(self, task: Task[Any]) -> dict[str, str]:
        post, record = self._post, task.record
        payload = record.payload
        timestamp = str(int(post.now()))
        headers = self._static | {
            "content-type": content_type(payload),
            "webhook-id": record.id,
            "webhook-timestamp": timestamp,
            "bide-topic": topic_text(record.topic),
            "bide-key": header_text(record.key),
            "bide-token": str(record.token),
            "bide-attempt": str(record.attempt),
        }
        if self._signer:
            headers["webhook-signature"] = self._signer.signature(record.id, timestamp, payload)
            headers["bide-signature"] = self._signer.signature_of(headers)
        return headers | well_formed(trace_headers(task))

    def _over(
        self,
        record: Record,
        began: float,
        target: Target | None,
        outcome: Outcome | None,
        status: int | None = None,
        excerpt: str = "",
    ) -> Outcome | None:
        """Tell the observer, if there is one, and give back the outcome."""
        if self._post.observe is not None:
            self._post.tell(
                WebhookResult(
                    topic=record.topic, key=record.key, id=record.id, attempt=record.attempt,
                    host=None if target is None else target.host, status=status, seconds=perf_counter() - began,
                    outcome=_WORDS[type(outcome)], excerpt=excerpt,
                    why=outcome.why if isinstance(outcome, Retry | Dead) else None,
                )
            )  # fmt: skip
        return outcome

    def __repr__(self) -> str:
        return f"<WebhookSink to {'where each task says' if self._target is None else self._target.host}>"


_WORDS: dict[type[Any], str] = {type(None): "done", Retry: "retry", Dead: "dead", Defer: "defer"}


def _seconds(length: Length, field: str) -> float:
    millis = duration(length, field=field)
    if not 1 <= millis <= 3_600_000:
        raise BadInput(field, length, "a duration from 1ms to 1h")
    return millis / 1000
