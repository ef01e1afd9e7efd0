"""Being written."""

from __future__ import annotations

from collections.abc import Mapping

from bide.service.console.shared import Shared
from bide.service.console.site import Answer, Route


class TasksPage:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def routes(self) -> Mapping[Route, Answer]:
        """By method and path."""
        return {}

    async def close(self) -> None:
        """Nothing runs in the background."""
