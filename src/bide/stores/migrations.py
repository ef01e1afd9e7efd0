"""Numbered migrations: what a folder holds of them, and what a database's own book says of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from bide.core.errors import StoreMismatch
from bide.stores.named_queries import read_statements

_NAME = re.compile(r"(\d{4})_(\w+)\.sql")


class Migration(NamedTuple):
    """One step."""

    number: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        return sha256(self.text.encode()).hexdigest()


class Migrations:
    """All that a store's code knows, and what they make of a database."""

    def __init__(self, folder: Path, book: str, done: str) -> None:
        """`book`: what makes the table of them; `done`: what enters one there, by its number, name and checksum."""
        self._folder = folder
        self._book = book
        self._done = done

    @cached_property
    def known(self) -> Sequence[Migration]:
        """All in the folder, in order."""
        found = []
        for path in sorted(self._folder.glob("*.sql")):
            named = _NAME.fullmatch(path.name)
            assert named is not None, path.name
            found.append(Migration(int(named[1]), named[2], path.read_text("utf-8")))
        return tuple(found)

    @property
    def wanted(self) -> int:
        """The version that this code works with."""
        return self.known[-1].number

    def version_of(self, book: Iterable[tuple[int, str]], shown: str) -> int:
        """The last number in `book`, of numbers and checksums in order. Raises StoreMismatch where one is not ours."""
        checksums = {one.number: one.checksum for one in self.known}
        version = 0
        for number, checksum in book:
            if number in checksums and checksums[number] != checksum:
                raise StoreMismatch(
                    f"{shown}: migration {number} was made by another version of its file; this schema was "
                    "written by a bide that was never released, or by hand: give another schema or prefix"
                )
            version = number
        return version

    def check(self, version: int, shown: str) -> None:
        """Raises StoreMismatch, with what to do, where the schema is missing (0) or older than is wanted."""
        if version < self.wanted:
            known = f"its schema is version {version}, this bide works with {self.wanted}"
            what = known if version else "no bide schema there"
            raise StoreMismatch(
                f"{shown}: {what}; run `bide migrate` with a user who may create tables (it only adds, and other "
                "processes may go on)"
            )

    def statements(self, write: Callable[[str], str], since: int) -> list[str]:
        """The statements that bring version `since` to the wanted one; `write` fills in the names of the tables."""
        written = [write(self._book)] if since == 0 else []
        for one in self.known:
            if one.number > since:
                written += [write(text) for text in read_statements(one.text)]
                written.append(write(self._done) % (one.number, one.name, one.checksum))
        return written

    def steps(self, since: int) -> list[str]:
        """The names of those after version `since`."""
        return [f"{one.number:04} {one.name}" for one in self.known if one.number > since]
