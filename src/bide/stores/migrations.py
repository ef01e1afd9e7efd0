"""Numbered migrations: what a folder holds of them, and what a database's own book says of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from bide.core.errors import StoreMismatch

_NAME = re.compile(r"(\d{4})_(\w+)\.sql")


class Migration(NamedTuple):
    """One step."""

    number: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        return sha256(self.text.encode()).hexdigest()


def read_migrations(folder: Path) -> Sequence[Migration]:
    """All in `folder`, in order."""
    found = []
    for path in sorted(folder.glob("*.sql")):
        named = _NAME.fullmatch(path.name)
        assert named is not None, path.name
        found.append(Migration(int(named[1]), named[2], path.read_text("utf-8")))
    return tuple(found)


def version_of(book: Iterable[tuple[int, str]], known: Sequence[Migration], shown: str) -> int:
    """The last number in `book`, of numbers and checksums in order. Raises StoreMismatch where one is not ours."""
    checksums = {one.number: one.checksum for one in known}
    version = 0
    for number, checksum in book:
        if number in checksums and checksums[number] != checksum:
            raise StoreMismatch(
                f"{shown}: migration {number} was made by another version of its file; this schema was "
                "written by a bide that was never released, or by hand: give another schema or prefix"
            )
        version = number
    return version


def check_version(version: int, wanted: int, shown: str) -> None:
    """Raises StoreMismatch, with what to do, where the schema is missing (0) or older than is wanted."""
    if version < wanted:
        what = f"its schema is version {version}, this bide works with {wanted}" if version else "no bide schema there"
        raise StoreMismatch(
            f"{shown}: {what}; run `bide migrate` with a user who may create tables (it only adds, and other "
            "processes may go on)"
        )
