"""One task: its state in a sentence, its times, its deliveries, the reasons why it was late, and the possible changes.

Finished tasks are shown while they are remembered. A key that a browser cannot have in a path (`.` and `..`) has the
address `/task?topic=..&key=..`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from msgspec import DecodeError, to_builtins

from bide.core.names import check_name, check_topic
from bide.core.options import NO_OPTIONS, Options, decode_options, recurrence_of
from bide.core.records import Pause, Record, Ref, Result
from bide.engine.history import MINUTE
from bide.insight.cached_query import CachedQuery
from bide.insight.task_history import TaskHistory, task_history
from bide.service.access import Verb
from bide.service.console.actions import possible
from bide.service.console.pages import Answer, ConsoleContext, PageRequest, Route
from bide.service.console.rendering import address, payload_view, task_address
from bide.service.console.sentences import meaning, reasons
from bide.service.requests import Reply

_SAID: Mapping[str, str] = {
    Result.MOVED: "It was moved.",
    "past": "It was moved to a time that has passed ({ago}), so it is due now.",
    "fired": "It is due now; the next free worker gets it.",
    Result.CANCELLED: "It was cancelled: no delivery will start.",
    Result.CANCELLED_WHILE_LEASED: "It was cancelled while it was being delivered: no further delivery follows.",
    Result.REDRIVEN: "It begins a new life.",
    Result.UNDER_WAY: "Nothing was changed: it is already being delivered.",
    Result.REFUSED: "Nothing was changed: that would be after its deadline.",
    Result.FINISHED: "Nothing was changed: it has finished.",
    Result.STALE_TOKEN: "Nothing was changed: the task is no longer as you saw it. Below is how it is now.",
    Result.NOT_FOUND: "Nothing was changed: there is no such task any more.",
}  # fmt: skip
_SANDBOX = "default-src 'none'; sandbox"


class TaskPage:
    """The page of a task, with its live part and its payload. `paused`: the paused topics, as of a moment ago."""

    def __init__(self, context: ConsoleContext, paused: CachedQuery[Mapping[str, Pause]]) -> None:
        self._app = context.app
        self._paused = paused
        parts = (("", self._page), ("/live", self._live), ("/payload", self._payload))
        self.routes: Mapping[Route, Answer] = {
            ("GET", path + part): answer for path in ("/tasks/{topic}/{key}", "/task") for part, answer in parts
        }

    async def _page(self, request: PageRequest) -> Reply:
        ref = ref_of(request)
        values = await self._shared_values(request, ref)
        if values is None:
            return self._gone(request, ref)
        record: Record = values["record"]
        options: Options | None = None
        with suppress(DecodeError):  # they are damaged
            options = decode_options(record.options) if record.options else NO_OPTIONS
        policy = None if options is None else options.retry
        said = request.field("said")
        return request.render(
            "task.html",
            **values,
            said=request.t(_SAID[said], ago=request.locale.relative(record.due_at)) if said in _SAID else "",
            well=said
            in ("fired", "past", Result.MOVED, Result.CANCELLED, Result.CANCELLED_WHILE_LEASED, Result.REDRIVEN),
            payload=payload_view(record.payload),
            headers=None if options is None else options.headers,
            policy=None if policy is None else to_builtins(policy),
            verbs=possible(request, record.state, [record.topic]),
        )

    async def _live(self, request: PageRequest) -> Reply:
        ref = ref_of(request)
        values = await self._shared_values(request, ref)
        if values is None:
            return request.render("task_over.html", ref=ref)
        return request.render("task_live.html", **values)

    async def _payload(self, request: PageRequest) -> Reply:
        """The whole payload, as a download that no browser displays."""
        ref = ref_of(request)
        [task] = await self._app.get_many([ref])
        if task is None:
            return self._gone(request, ref)
        headers = {
            "content-disposition": f'attachment; filename="payload-{task.id}.txt"',
            "content-security-policy": _SANDBOX,
        }
        return Reply(200, task.payload_bytes, "text/plain; charset=utf-8", headers)

    async def _shared_values(self, request: PageRequest, ref: Ref) -> Mapping[str, Any] | None:
        """The values that the page and its live part share; None if there is no such task."""
        history, paused = await asyncio.gather(task_history(self._app, *ref), self._paused.get())
        if history is None:
            return None
        record, pause = history.record, paused.get(ref.topic)
        seen_token = request.field("token")  # with which an open page was loaded
        return {
            "ref": record.ref,
            "record": record,
            "story": history,
            "due": record.state.live and record.wake_at <= request.locale.now,
            "pause": pause,
            "recurrence": recurrence_of(record.options),
            "meaning": meaning(request.locale, history, pause),
            "reasons": list(reasons(request.locale, history, pause)),
            "timeline": _timeline(history),
            "over": not record.state.live,
            "changed": bool(seen_token) and seen_token != str(record.token) and record.state.live,
            "live": address(task_address(record.topic, record.key, "live"), token=record.token),
            "whole": task_address(record.topic, record.key, "payload"),
        }

    def _gone(self, request: PageRequest, ref: Ref) -> Reply:
        keep = self._app.config.retentions.of(ref.topic)
        return request.render("task_gone.html", status=404, ref=ref, keep=keep)


def _timeline(history: TaskHistory) -> str:
    """The address of the timeline around the last delivery; empty if the history does not have it."""
    last = history.last
    if history.cohort is None or last is None or last.planned is None or last.began is None:
        return ""
    around = {"from": last.planned - 5 * MINUTE, "until": last.began + 5 * MINUTE}
    return address("/timeline", topic=history.record.topic, **around)


def ref_of(request: PageRequest) -> Ref:
    """The task that the address names. Raises BadInput, Forbidden."""
    topic, key = request.path_values if request.path_values else (request.raw_field("topic"), request.raw_field("key"))
    ref = Ref(check_topic(topic), check_name("key", key))
    request.caller.check(Verb.READ, ref.topic)
    return ref
