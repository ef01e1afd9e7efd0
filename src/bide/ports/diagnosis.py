"""The schema of a store, and findings about its health."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class HasSchema(Protocol):
    """A versioned schema."""

    async def schema_version(self) -> tuple[int, int]:
        """The version found (0: none), and the one needed here. Works before `open` if `open` checks the schema."""
        ...

    async def plan(self) -> list[str] | None:
        """The statements that `migrate` would run now; None: opening the store brings it up to date."""
        ...

    async def migrate(self) -> None:
        """Bring the schema to the version of this code. Does nothing if it is current. Works before `open`."""
        ...


class Finding(Struct, frozen=True):
    """The result of one check of `bide doctor`."""

    ok: bool
    what: str
    advice: str = ""
    """The remedy, if it is not ok."""
    severe: bool = False
    """If not ok, True: tasks are lost or may be; False: it deserves a warning."""


class Diagnoses(Protocol):
    """An examination of the store and its surroundings."""

    async def diagnose(self) -> list[Finding]: ...
