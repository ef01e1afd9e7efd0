"""The schema of a store, and what is found out about its health."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class HasSchema(Protocol):
    """A schema that has versions."""

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
    """One thing that `bide doctor` has examined."""

    ok: bool
    what: str
    advice: str = ""
    """The remedy, where it is not ok."""
    severe: bool = False
    """If not ok: tasks are lost or may be, else it is worth a warning."""


class Diagnoses(Protocol):
    """An examination of the store and its surroundings."""

    async def diagnose(self) -> list[Finding]: ...
