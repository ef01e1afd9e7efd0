"""Durable data other than tasks, kept in the store as hidden tasks of a reserved topic, which are never leased.

So every store keeps it durably and atomically without extra operations, and all processes on a store share it. Callers
can neither see nor change those topics: the client's verbs refuse them and leave them out. The due time of such a task
is the end of its retention, so the index of due tasks also finds expired data.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from bide.core.errors import StoreUnavailable
from bide.core.instants import LAST_INSTANT, At, Millis
from bide.core.names import RESERVED_TOPIC, check_name, new_id
from bide.core.records import Cancel, Filter, NewTask, OnConflict, Page, Record, Ref, Result, State, Token, Topic
from bide.ports import Clock, Verbs, all_answers

_PAGE = 500
_TRIES = 50


class SettingsStore(Struct):
    """Bytes by name, in an open store. Errors are the store's own: StoreUnavailable, StoreFull."""

    _store: Verbs
    _clock: Clock
    _topic: Topic = RESERVED_TOPIC

    async def put(self, name: str, value: bytes, *, until: Millis = LAST_INSTANT) -> None:
        """Store `value` under `name`, replacing any earlier value. Durable once this returns. One store call.

        After `until` the value stays until `forget_past` removes it.
        """
        await self._add(name, value, OnConflict.REPLACE, until)

    async def put_if_absent(self, name: str, value: bytes, *, until: Millis = LAST_INSTANT) -> bool:
        """Store `value` unless the name exists; True if this call did. Exactly one of many concurrent calls does."""
        return await self._add(name, value, OnConflict.REFUSE, until) is Result.CREATED

    async def update(self, name: str, change: Callable[[bytes | None], bytes], *, until: Millis = LAST_INSTANT) -> None:
        """Store what `change` makes of the value or of None; it is called again if another call came first.

        Two store calls. If this raises, the update may still have been made.
        """
        for _ in range(_TRIES):
            old = await self._record(name)
            value = change(None if old is None else old.payload)
            how, token = (OnConflict.REFUSE, None) if old is None else (OnConflict.REPLACE, old.token)
            if await self._add(name, value, how, until, token) in (Result.CREATED, Result.REPLACED):
                return
        raise StoreUnavailable(f"not done: {name} was changed by others at each of {_TRIES} tries")

    async def get(self, name: str) -> bytes | None:
        record = await self._record(name)
        return None if record is None else record.payload

    async def _record(self, name: str) -> Record | None:
        [record] = await self._store.get([Ref(self._topic, check_name("name", name))])
        return None if record is None or record.state is not State.WAITING else record

    async def all(self, prefix: str = "") -> dict[str, bytes]:
        """All values whose name begins with `prefix`, by name. O(all values), some hundreds per store call."""
        found = await self.records(Filter(topic=self._topic, state=State.WAITING))
        return dict(sorted((one.key, one.payload) for one in found if one.key.startswith(prefix)))

    async def ending(self, since: Millis, before: Millis) -> dict[str, bytes]:
        """The values whose `until` is from `since` (inclusive) to `before` (exclusive), soonest first. O(found)."""
        where = Filter(topic=self._topic, state=State.WAITING, wake_from=since, wake_before=before)
        return {one.key: one.payload for one in await self.records(where)}

    async def remove(self, name: str) -> bool:
        """Remove the value without a trace; True if there was one."""
        cancel = Cancel(self._topic, check_name("name", name))
        [answer] = await all_answers(await self._store.change([cancel], now=self._clock.now()))
        return answer.result is Result.CANCELLED

    async def forget_past(self) -> None:
        """Remove some hundreds of the values whose `until` has passed, oldest first."""
        now = self._clock.now()
        past = Filter(topic=self._topic, state=State.WAITING, wake_before=now)
        found = await self._store.find(past, Page(limit=_PAGE))
        # by token, so that a value that was replaced meanwhile stays
        cancels = [Cancel(self._topic, one.key, if_token=one.token) for one in found.tasks]
        if cancels:
            await all_answers(await self._store.change(cancels, now=now))

    async def records(self, where: Filter) -> list[Record]:
        """The hidden tasks that match, some hundreds per store call. O(found)."""
        records: list[Record] = []
        cursor: str | None = None
        while True:
            page = await self._store.find(where, Page(limit=_PAGE, cursor=cursor))
            records += page.tasks
            cursor = page.cursor
            if cursor is None:
                return records

    async def _add(
        self, name: str, value: bytes, how: OnConflict, until: Millis, if_token: Token | None = None
    ) -> Result:
        key = check_name("name", name)
        new = NewTask(self._topic, key, new_id(), At(until), value, on_conflict=how, if_token=if_token)
        [answer] = await all_answers(await self._store.add([new], now=self._clock.now()))
        return answer.result
