"""Settings that must survive, kept in the store itself: hidden tasks of a reserved topic, which are never due.

So every store keeps them, durably and atomically, without an operation of its own; and whoever shares the store shares
them. Callers can neither see nor touch that topic: the client's verbs refuse it and leave it out.
"""

from __future__ import annotations

from bide.core.instants import LAST_INSTANT
from bide.core.names import RESERVED_TOPIC, check_name, new_id
from bide.core.records import At, Cancel, Filter, NewTask, OnConflict, Page, Record, Ref, Result, State
from bide.ports import Clock, Verbs

_PAGE = 500


class Kept:
    """Bytes by name, in an open store. Errors are the store's own: StoreUnavailable, StoreFull."""

    def __init__(self, store: Verbs, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def put(self, name: str, value: bytes) -> None:
        """Keep `value` under `name`, in place of what was there. Durable once this returns. One store call."""
        await self._add(name, value, OnConflict.REPLACE)

    async def put_if_absent(self, name: str, value: bytes) -> bool:
        """Keep it unless there is one by that name; whether this call did. Of many at once exactly one does."""
        return await self._add(name, value, OnConflict.REFUSE) is Result.CREATED

    async def get(self, name: str) -> bytes | None:
        """What is kept under `name`; None: nothing."""
        [record] = await self._store.get([Ref(RESERVED_TOPIC, check_name("name", name))])
        return None if record is None or not _is_kept(record) else record.payload

    async def all(self, prefix: str = "") -> dict[str, bytes]:
        """Everything whose name begins with `prefix`, by name. O(all settings), some hundreds to a store call."""
        found: dict[str, bytes] = {}
        cursor: str | None = None
        while True:
            page = await self._store.find(
                Filter(topic=RESERVED_TOPIC, state=State.WAITING), Page(limit=_PAGE, cursor=cursor)
            )
            found.update((record.key, record.payload) for record in page.tasks if record.key.startswith(prefix))
            cursor = page.cursor
            if cursor is None:
                return dict(sorted(found.items()))

    async def remove(self, name: str) -> bool:
        """Forget it, without a trace; whether there was one."""
        cancel = Cancel(RESERVED_TOPIC, check_name("name", name))
        [answer] = await self._store.change([cancel], now=self._clock.now())
        return answer.result is Result.CANCELLED

    async def _add(self, name: str, value: bytes, on_conflict: OnConflict) -> Result:
        new = NewTask(
            RESERVED_TOPIC, check_name("name", name), new_id(), At(LAST_INSTANT), value, on_conflict=on_conflict
        )
        [answer] = await self._store.add([new], now=self._clock.now())
        return answer.result


def _is_kept(record: Record) -> bool:
    return record.state is State.WAITING
