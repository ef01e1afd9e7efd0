"""The calls of consumers in any language: lease (which can wait), settle, extend."""

from __future__ import annotations

from msgspec import UNSET

from bide.core.errors import BadInput
from bide.core.instants import Millis, duration
from bide.core.names import check_name, check_topic
from bide.core.outcomes import Dead, Defer, Done, Outcome, Retry
from bide.core.records import Lease
from bide.engine.desk import Desk
from bide.engine.settler import Settling
from bide.ports.remote import LONGEST_LEASE, SHORTEST_LEASE
from bide.service import schemas
from bide.service.authz import Verb
from bide.service.contract import ExtendedShape, LeasedShape, SettledShape
from bide.service.replies import Reply, bad_input, reply
from bide.service.requests import Request
from bide.service.schemas import LONGEST_WAIT, task_shape
from bide.service.verbs import asked

_OUTCOMES = ("done", "retry", "defer", "dead")


class Consuming:
    """Each method is a call of the contract."""

    def __init__(self, desk: Desk, settling: Settling, *, instance: str, lease: Millis) -> None:
        self._desk = desk
        self._settling = settling
        self._instance = instance
        self._lease = lease

    async def lease(self, request: Request) -> Reply:
        """Waits at the desk, and leaves it when the client goes, or may no longer."""
        ask: schemas.LeaseAsk = asked(request, "lease")
        room = {check_topic(topic, "topics"): count for topic, count in ask.topics.items()}
        request.caller.check_all(Verb.WORK, room)
        wait = _bounded(ask.wait, "wait", 0, 1_000 * LONGEST_WAIT) / 1_000
        lease_for = self._length(ask.lease_for)
        holder = f"{request.caller.name}@{self._instance}"
        leasing = self._desk.lease(room, holder=holder, lease_for=lease_for, wait=wait)
        tasks = await request.attended(leasing, undo=self._desk.give_back)
        paused = [topic for topic in room if topic in self._desk.held_back.topics]
        return reply(
            LeasedShape([task_shape(record) for record in request.caller.visible(tasks, Verb.WORK)], paused or UNSET)
        )

    async def settle(self, request: Request) -> Reply:
        batch: list[schemas.Settle] = asked(request, "settle")
        request.caller.check_all(Verb.WORK, [ask.topic for ask in batch])
        ended = []
        for place, ask in enumerate(batch):
            try:
                ended.append((Lease(check_topic(ask.topic), check_name("key", ask.key), ask.token), _outcome(ask)))
            except BadInput as error:
                raise bad_input(error, f"[{place}].") from None
        return reply(SettledShape(await self._settling.settle(ended, who=request.caller.name)))

    async def extend(self, request: Request) -> Reply:
        ask: schemas.Extend = asked(request, "extend")
        request.caller.check_all(Verb.WORK, [one.topic for one in ask.leases])
        leases = [Lease(check_topic(one.topic), check_name("key", one.key), one.token) for one in ask.leases]
        return reply(ExtendedShape(await self._settling.extend(leases, self._length(ask.lease_for))))

    def _length(self, given: str | None) -> Millis:
        return self._lease if given is None else _bounded(given, "lease_for", SHORTEST_LEASE, LONGEST_LEASE)


def _bounded(given: str, field: str, least: Millis, most: Millis) -> Millis:
    millis = duration(given, field=field)
    if not least <= millis <= most:
        raise BadInput(field, given, f"from {least // 1_000} to {most // 1_000} seconds")
    return millis


def _outcome(ask: schemas.Settle) -> Outcome:
    """Raises BadInput."""
    at, delay = ask.at, ask.delay
    if ask.outcome == "done":
        return Done(again_at=at, again_in=delay)
    if ask.outcome == "retry":
        return Retry(ask.error or None, at=at, delay=delay)
    if ask.outcome == "defer":
        return Defer(delay, at=at)
    if ask.outcome == "dead":
        if at is not None or delay is not None:
            raise BadInput("at, delay", (at, delay), "neither with dead")
        return Dead(ask.error or "the consumer said so")
    raise BadInput("outcome", ask.outcome, f"one of {', '.join(_OUTCOMES)}")
