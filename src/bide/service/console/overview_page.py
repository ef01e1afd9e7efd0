"""The first page: how much there is, how late it goes out, who works on it, and whether all is well."""

from __future__ import annotations

from collections.abc import Mapping

from bide.service.callers import Verb
from bide.service.console.shared import Shared
from bide.service.console.site import Answer, Route
from bide.service.console.visit import Visit
from bide.service.replies import Reply


class OverviewPage:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def routes(self) -> Mapping[Route, Answer]:
        """By method and path."""
        return {("GET", "/"): self._page, ("GET", "/overview/live"): self._live}

    async def close(self) -> None:
        """Nothing runs in the background."""

    async def _page(self, visit: Visit) -> Reply:
        visit.check(Verb.READ, None)
        return visit.page("overview.html", health=await self._shared.health.ready())

    async def _live(self, visit: Visit) -> Reply:
        """What is asked for again and again while the page is open."""
        visit.check(Verb.READ, None)
        return visit.page("overview_live.html", health=await self._shared.health.ready())
