"""A store's schema and its health, for those who look after it."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class HasSchema(Protocol):
    """A store with a schema that has versions."""

    async def schema_version(self) -> tuple[int, int]:
        """The version found (0: nothing), and the one needed here. Works before `open` where that checks the schema."""
        ...

    async def plan(self) -> list[str] | None:
        """The statements that `migrate` would run now; None: opening alone brings it up to date."""
        ...

    async def migrate(self) -> None:
        """Bring the schema to what this code wants; nothing to do is no error. Works before `open`."""
        ...


class Finding(Struct, frozen=True):
    """One thing that `doctor` looked at."""

    ok: bool
    what: str
    advice: str = ""
    severe: bool = False
    """When not ok: tasks are lost or may be; else it is worth a warning."""


class Diagnoses(Protocol):
    """A store that can examine itself and its surroundings."""

    async def diagnose(self) -> list[Finding]: ...
