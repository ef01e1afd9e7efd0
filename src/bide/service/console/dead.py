"""Dead letters: by topic and by what killed them, with a way to send one, some or all of them again."""

from __future__ import annotations

from bide.core.errors import BadInput
from bide.core.names import check_topic
from bide.core.records import Result, Topic, summed
from bide.core.texts import error_parts
from bide.insight.cached_query import CachedQuery
from bide.insight.dead_letters import MOST_LOOKED_AT, DeadLetters, dead_letters, tasks_of_group
from bide.service.authz import Verb
from bide.service.console.page_request import Page, Shared, Visit
from bide.service.console.rendering import address
from bide.service.replies import Reply

_EVERY = 1.0
"""Seconds between two looks at the dead, however many ask."""
_SHARE = 0.05
"""Of the time that looks may take: the page does not ask by itself."""
_MOST_GROUPS = 200


class DeadPage(Page):
    """All groups, or the tasks of one."""

    def __init__(self, shared: Shared) -> None:
        self._look: CachedQuery[DeadLetters] = CachedQuery(lambda: dead_letters(shared.app), every=_EVERY, share=_SHARE)
        super().__init__({("GET", "/dead"): self._page}, self._look)

    async def _page(self, visit: Visit) -> Reply:
        topic = visit.exact("topic")
        error = visit.given("error")
        if error and not topic:
            raise BadInput("topic", topic, "the topic of the group as well")
        if topic and (error or visit.given("list")):
            return await self._group(visit, check_topic(topic), error or None)
        return await self._groups(visit, check_topic(topic) if topic else None)

    async def _groups(self, visit: Visit, only: Topic | None) -> Reply:
        """All groups; those of one topic."""
        if only is None:
            visit.caller.check_somewhere(Verb.READ)
        else:
            visit.caller.check(Verb.READ, only)
        said = _said(visit)
        found = await (self._look.fresh() if said or visit.given("fresh") else self._look.get())
        shown = {
            topic: count
            for topic, count in found.totals.items()
            if only in (None, topic) and visit.caller.may(Verb.READ, topic)
        }
        groups = [group for group in found.groups if group.topic in shown]
        may_redrive = {topic for topic in shown if visit.caller.may(Verb.REDRIVE, topic)}
        return visit.page(
            "dead.html", only=only, groups=groups[:_MOST_GROUPS], more=max(0, len(groups) - _MOST_GROUPS),
            totals=sorted(shown.items(), key=lambda one: (-one[1].number, one[0])), all=summed(shown.values()),
            partly=found.partly & shown.keys(), looked=sum(group.number for group in groups), most=MOST_LOOKED_AT,
            may=may_redrive, said=said, age=int(self._look.age * 1000),
        )  # fmt: skip

    async def _group(self, visit: Visit, topic: Topic, error: str | None) -> Reply:
        """The tasks of one group, or of a topic, to choose from."""
        visit.caller.check(Verb.READ, topic)
        limit = visit.whole("limit", 100, least=1, most=500)
        page = await tasks_of_group(visit.client, topic, error, visit.given("cursor") or None, limit=limit)
        tasks = visit.caller.visible(page.tasks)
        traced = [one for one in tasks if error and error_parts(one.error)[1]]
        following = None
        if page.cursor is not None:
            following = address("/dead", topic=topic, error=error, list="yes", limit=limit, cursor=page.cursor)
        return visit.page(
            "dead_group.html", topic=topic, error=error, tasks=tasks, next=following,
            first=address("/dead", topic=topic, error=error, list="yes") if visit.given("cursor") else None,
            here=address("/dead", topic=topic, error=error, list="yes"), may=visit.caller.may(Verb.REDRIVE, topic),
            said=_said(visit), traced=traced[-1] if traced else None,
        )  # fmt: skip


def _said(visit: Visit) -> str:
    """The answer to a form that was sent from this page."""
    return Result.REDRIVEN.value if visit.given("said") == Result.REDRIVEN.value else ""
