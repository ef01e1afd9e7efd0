"""The store calls about pauses, and leases that heed them: a worker of another process is held back here.

Pause and resume need ADMIN; what is paused is told of the topics with which the caller may do anything at all.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from bide.core.instants import Millis
from bide.core.names import LONGEST_NAME, check_name, check_topic
from bide.core.pause import Pause
from bide.core.records import Leased, Topic
from bide.engine.client import Client
from bide.engine.pauses import HeldBack
from bide.ports.wire import PauseAsk
from bide.service import store_checks as checks
from bide.service.callers import Caller, Verb
from bide.service.pausing import pause_by, resume_by

_LOOK_AGAIN: Millis = 2_000
"""After how long a client looks again that has nothing to wait for but what is paused."""


class StorePauses:
    """On the store of an open client; `held_back` is what is known to be paused."""

    def __init__(self, client: Client, held_back: HeldBack | None) -> None:
        self._client = client
        self._held_back = held_back

    def check(self, ask: PauseAsk, caller: Caller) -> None:
        """Raises BadInput, Forbidden."""
        caller.check(Verb.ADMIN, check_topic(ask.topic))
        if ask.who is not None:
            checks.check_text("who", ask.who, LONGEST_NAME)

    async def pause(self, ask: PauseAsk, caller: Caller) -> bool:
        return await pause_by(self._client, ask.topic, in_the_name_of(caller, ask.who))

    async def resume(self, ask: PauseAsk, caller: Caller) -> bool:
        return await resume_by(self._client, ask.topic, in_the_name_of(caller, ask.who))

    async def paused(self, caller: Caller) -> list[Pause]:
        found = await self._client.paused()
        return [one for one in found.values() if any(caller.may(verb, one.topic) for verb in caller.verbs)]

    async def lease(self, wants: Mapping[Topic, int], *, now: Millis, until: Millis, holder: str) -> Leased:
        """`Store.lease` without what is paused; where nothing else waits, the client is told to look again."""
        held: dict[Topic, int] = {}
        if self._held_back is not None:
            await self._held_back.first()
            held = {topic: 0 for topic in wants if topic in self._held_back.topics}
            wants = {topic: want for topic, want in wants.items() if topic not in held} if held else wants
        lease = self._client.store.lease
        leased = Leased([], None, now)
        if wants or not held:
            leased = await lease(wants, now=now, until=until, holder=holder)
        if held and leased.next_wake is None:
            waits = await lease(held, now=now, until=until, holder=holder)
            if waits.next_wake is not None:  # so it is not empty, and it would be asked again and again if told more
                leased = replace(leased, next_wake=max(waits.next_wake, waits.now + _LOOK_AGAIN))
        return leased


def in_the_name_of(caller: Caller, who: str | None) -> str:
    """Who is named: the caller, whoever else they say that it was."""
    return caller.name if who is None else f"{caller.name}/{who}"


def held_by(caller: Caller, holder: str) -> str:
    """Who holds a lease, or works: behind the caller's name, so that nobody is taken for a worker of another's.

    Raises BadInput.
    """
    return f"{caller.name[:64]}@{check_name('holder', holder)}".encode()[:LONGEST_NAME].decode(errors="ignore")
