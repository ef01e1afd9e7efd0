"""All pages of the console, by method and path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from bide.service.console.actions_page import ActionsPage
from bide.service.console.dead_page import DeadPage
from bide.service.console.overview_page import OverviewPage
from bide.service.console.shared import Shared
from bide.service.console.site import Answer, Route
from bide.service.console.tasks_page import TasksPage
from bide.service.console.timeline_page import TimelinePage
from bide.service.console.topics_page import TopicsPage


class Page(Protocol):
    """One page with its parts and forms."""

    def routes(self) -> Mapping[Route, Answer]:
        """By method and path; a part of a path in braces stands for any text."""
        ...

    async def close(self) -> None:
        """End what runs in the background."""
        ...


class Console:
    """Every page of one instance. Make it in the running loop, once the app is open, and close it before the app."""

    def __init__(self, shared: Shared) -> None:
        self._pages: Sequence[Page] = [
            page(shared) for page in (OverviewPage, TimelinePage, TasksPage, ActionsPage, DeadPage, TopicsPage)
        ]

    def routes(self) -> Mapping[Route, Answer]:
        """By method and path."""
        return {route: answer for page in self._pages for route, answer in page.routes().items()}

    async def close(self) -> None:
        """End what runs in the background."""
        for page in self._pages:
            await page.close()
