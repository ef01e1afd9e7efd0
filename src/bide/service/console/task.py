"""One task: what it is and means now, when it was to happen and did, why it was late, and what may be done with it.

Also one that has ended, while it is remembered. A key that a browser cannot have in a path (`.` and `..`) is asked for
as `/task?topic=..&key=..`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from msgspec import DecodeError, to_builtins

from bide.core.names import check_name, check_topic
from bide.core.options import NO_OPTIONS, Options, decode_options
from bide.core.records import Pause, Record, Ref, Result
from bide.engine.history import MINUTE
from bide.insight.cached_query import CachedQuery
from bide.insight.story import Story, story
from bide.service.authz import Verb
from bide.service.console.actions import possible
from bide.service.console.lateness import meaning, reasons
from bide.service.console.page_request import Answer, Route, Shared, Visit
from bide.service.console.rendering import address, task_address
from bide.service.console.sanitize import shown
from bide.service.replies import Reply

_SAID: Mapping[str, str] = {
    Result.MOVED: "It was moved.",
    "past": "It was moved to a time that is over, {ago}, so it is due now.",
    "fired": "It is due now, and the next worker gets it.",
    Result.CANCELLED: "It was cancelled: no delivery starts any more.",
    Result.CANCELLED_WHILE_LEASED: "It was cancelled while being delivered: no other delivery follows.",
    Result.REDRIVEN: "It begins a new life.",
    Result.UNDER_WAY: "Nothing was changed: it is being delivered already.",
    Result.REFUSED: "Nothing was changed: that would be after its deadline.",
    Result.FINISHED: "Nothing was changed: it is over.",
    Result.STALE_TOKEN: "Nothing was changed: it is no longer as you saw it. Below is how it is now.",
    Result.NOT_FOUND: "Nothing was changed: it is not there any more.",
}  # fmt: skip
_SANDBOX = "default-src 'none'; sandbox"


class TaskPage:
    """Belongs to the event loop in which the app is open. `paused`: which topics are, as of a moment ago."""

    def __init__(self, shared: Shared, paused: CachedQuery[Mapping[str, Pause]]) -> None:
        self._app = shared.app
        self._paused = paused
        parts = (("", self._page), ("/live", self._live), ("/payload", self._payload))
        self.routes: Mapping[Route, Answer] = {
            ("GET", path + part): answer for path in ("/tasks/{topic}/{key}", "/task") for part, answer in parts
        }

    async def _page(self, visit: Visit) -> Reply:
        ref = _asked(visit)
        told = await self._told(visit, ref)
        if told is None:
            return self._gone(visit, ref)
        record: Record = told["record"]
        options = _options(record)
        policy = None if options is None else options.retry
        said = visit.given("said")
        return visit.page(
            "task.html",
            **told,
            said=visit.say(_SAID[said], ago=visit.phrases.relative(record.due_at)) if said in _SAID else "",
            well=said
            in ("fired", "past", Result.MOVED, Result.CANCELLED, Result.CANCELLED_WHILE_LEASED, Result.REDRIVEN),
            payload=shown(record.payload),
            headers=None if options is None else options.headers,
            policy=None if policy is None else to_builtins(policy),
            verbs=possible(visit, record.state, [record.topic]),
        )

    async def _live(self, visit: Visit) -> Reply:
        """The part that is asked for again while the page is open."""
        ref = _asked(visit)
        told = await self._told(visit, ref)
        return visit.page("task_over.html", ref=ref) if told is None else visit.page("task_live.html", **told)

    async def _payload(self, visit: Visit) -> Reply:
        """All of it, to be saved: no browser shows it as anything."""
        ref = _asked(visit)
        [task] = await self._app.get_many([ref])
        if task is None:
            return self._gone(visit, ref)
        headers = {
            "content-disposition": f'attachment; filename="payload-{task.id}.txt"',
            "content-security-policy": _SANDBOX,
        }
        return Reply(200, task.payload_bytes, "text/plain; charset=utf-8", headers)

    async def _told(self, visit: Visit, ref: Ref) -> Mapping[str, Any] | None:
        """The values of the parts that both pages have; None where there is no such task."""
        told, paused = await asyncio.gather(story(self._app, *ref), self._paused.get())
        if told is None:
            return None
        record, pause = told.record, paused.get(ref.topic)
        seen = visit.given("token")
        return {
            "ref": record.ref,
            "record": record,
            "story": told,
            "due": record.state.live and record.wake_at <= visit.phrases.now,
            "pause": pause,
            "meaning": meaning(visit.phrases, told, pause),
            "reasons": reasons(visit.phrases, told, pause),
            "timeline": _timeline(told),
            "over": not record.state.live,
            "changed": bool(seen) and seen != str(record.token) and record.state.live,
            "live": _with_token(task_address(record.topic, record.key, "live"), record),
            "whole": task_address(record.topic, record.key, "payload"),
        }

    def _gone(self, visit: Visit, ref: Ref) -> Reply:
        keep = self._app.terms.retention_of(ref.topic)
        return visit.page("task_gone.html", status=404, ref=ref, keep=keep)


def _timeline(told: Story) -> str:
    """The time around its last delivery, on the timeline; empty where the history tells nothing of it."""
    last = told.last
    if told.crowd is None or last is None or last.planned is None or last.began is None:
        return ""
    around = {"from": last.planned - 5 * MINUTE, "until": last.began + 5 * MINUTE}
    return address("/timeline", topic=told.record.topic, **around)


def _with_token(where: str, record: Record) -> str:
    """Of the part that is kept fresh: it shall know how the task was when its page was loaded."""
    return f"{where}{'&' if '?' in where else '?'}token={record.token}"


def _asked(visit: Visit) -> Ref:
    """The task that the address names. Raises BadInput, Forbidden."""
    topic, key = visit.part if visit.part else (visit.exact("topic"), visit.exact("key"))
    ref = Ref(check_topic(topic), check_name("key", key))
    visit.caller.check(Verb.READ, ref.topic)
    return ref


def _options(record: Record) -> Options | None:
    """The options that travel with it; None where they are damaged."""
    try:
        return decode_options(record.options) if record.options else NO_OPTIONS
    except DecodeError:
        return None
