"""What the demo remembers between two runs, kept in the store itself: whose that is, and which numbers are taken."""

from __future__ import annotations

from bide.app import Bide
from bide.cli.surroundings import without_password
from bide.core.errors import BadInput
from bide.core.instants import Millis
from bide.core.names import SHOWN_TOPIC
from bide.core.records import Filter, Page
from bide.engine.kept import Kept

_MARK = "demo:numbers"
_FIRST = 10_000
_BLOCK = 2_000
"""Numbers that are taken at a time, so that an order does not cost a write more; a restart leaves out what is left."""


class Notebook:
    """Of an open app. Errors are the store's own."""

    def __init__(self, app: Bide) -> None:
        self._app = app
        self._next = self._end = 0

    async def refuse_strangers(self) -> None:
        """Take an empty store for the demo's; raises BadInput for one that holds tasks of others.

        Before anything is worked on: its handlers would take an order of somebody else's for their own.
        """
        marks = Kept(self._app.store, self._app.clock)
        if await marks.get(_MARK) is not None:
            return
        found = await self._app.find_page(Filter(), Page(limit=1))
        if found.tasks:
            raise BadInput(
                "--store",
                without_password(self._app.url),
                f"an empty store, or one of an earlier `bide serve --demo`: this one holds {found.tasks[0].topic}, and "
                "the demo would deliver what is not its own",
            )
        await marks.put_if_absent(_MARK, b"%d" % _FIRST)

    async def numbers(self, count: int = 1) -> range:
        """So many fresh numbers in a row: no order ever gets one of them again."""
        if self._end - self._next < count:
            marks = Kept(self._app.store, self._app.clock)
            self._next = max(self._end, int(await marks.get(_MARK) or _FIRST))
            self._end = self._next + max(count, _BLOCK)
            await marks.put(_MARK, b"%d" % self._end)
        self._next += count
        return range(self._next - count, self._next)

    async def made_until(self, what: str) -> Millis | None:
        """Until when `what` is made, by this run or an earlier one; None: it is not."""
        noted = await Kept(self._app.store, self._app.clock, SHOWN_TOPIC).get(f"demo:{what}")
        until = int(noted or 0)
        return until if until > self._app.clock.now() else None

    async def note_made(self, what: str, *, until: Millis) -> None:
        """Note that `what` is made, until that instant."""
        await Kept(self._app.store, self._app.clock, SHOWN_TOPIC).put(f"demo:{what}", b"%d" % until, until=until)
