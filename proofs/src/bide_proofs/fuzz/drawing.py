"""What a case is made of: choices out of one seed, and a few ways to damage what is valid."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

ODD_TEXT = (
    "\0", "\n", "\r", "\t", "\x1b", "\x7f", "\x85", "\u00a0", "\u00b2", "\u0661", "\u200b", "\u2028", "\u2100",
    "\u202e", "\ud800", "\udfff", "\ufeff", "\uff0f",
    "\U0001f600", "e\u0301", "%", "%00", "%2F", "%ff", "%zz", "/", "\\", "//",
    "..", ":", ";", "?", "#", "@", "[", "]", "{", "}", "(", ")", "'", '"', "`", "--", "/*", "+", "-", ".", ",",
    "&", "=",
    " ", "0", "-0", "1e9", "nan", "inf", "null", "true", "9" * 30, "x" * 300,
)  # fmt: skip
"""Characters and words that parsers trip over."""
ODD_NUMBERS = (
    0, 1, -1, 2, 10, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32, 2**48 - 1, 2**48, 2**53, 2**53 + 1,
    2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), -(2**63) - 1, 10**30, 253_402_300_799_999,
    253_402_300_800_000,
)  # fmt: skip


class Draw(random.Random):
    """The choices of one case, and what it says of itself if it fails."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name
        self.notes: list[str] = []
        self.labels: list[str] = []

    def note(self, what: object) -> None:
        """Said of the case if it fails."""
        self.notes.append(repr(what))

    def count(self, label: str) -> None:
        """What kind of case it was, for the report: so many ended like that."""
        self.labels.append(label)

    def chance(self, part: float) -> bool:
        return self.random() < part

    def of(self, *options: T) -> T:
        return options[int(self.random() * len(options))]

    def number(self) -> int:
        """A whole number: near an edge, small, or of any size."""
        kind = self.randrange(3)
        if kind == 0:
            return self.choice(ODD_NUMBERS) + self.randrange(-1, 2)
        return self.randrange(-5, 1_000) if kind == 1 else self.getrandbits(self.randrange(1, 80))

    def noise(self, most: int = 40) -> str:
        """Text of any characters."""
        size = self.randrange(most)
        if self.chance(0.5):
            return "".join(self.choice(ODD_TEXT) for _ in range(size // 4))
        return "".join(
            chr(self.randrange(32, 127) if self.chance(0.8) else self.randrange(0x3000)) for _ in range(size)
        )

    def changed(self, text: str, most: int = 3) -> str:
        """`text` with a few characters changed, lost, doubled or put in."""
        for _ in range(self.randrange(1, most + 1)):
            place = self.randrange(len(text) + 1)
            end = min(len(text), place + self.of(0, 1, 1, 1, 2, 5))
            kind = self.randrange(5)
            if kind == 0:
                text = text[:place] + text[end:]
            elif kind == 1:
                text = text[:end] + text[place:]
            elif kind == 2:
                text = text[:place] + self.choice(ODD_TEXT) + text[end:]
            elif kind == 3:
                text = text[:place] + chr(self.randrange(32, 127)) + text[end:]
            else:
                text = (
                    text[place:] + text[:place] if self.chance(0.1) else text[:place] + str(self.number()) + text[end:]
                )
        return text

    def text(self, valid: str) -> str:
        """Mostly nearly valid: `valid` itself, changed, or noise."""
        kind = self.random()
        return valid if kind < 0.3 else self.changed(valid) if kind < 0.85 else self.noise()

    def damaged(self, data: bytes, most: int = 4) -> bytes:
        """`data` with bits flipped, bytes changed, lost, put in, zeroed, or cut off."""
        changed = bytearray(data)
        for _ in range(self.randrange(1, most + 1)):
            place = self.randrange(len(changed) + 1)
            kind = self.randrange(8)
            if kind <= 1 and place < len(changed):
                changed[place] ^= 1 << self.randrange(8)
            elif kind == 2 and place < len(changed):
                changed[place] = self.of(0, 0xFF, 0x7F, 0x80, self.randrange(256))
            elif kind == 3:
                del changed[place : place + self.randrange(1, 9)]
            elif kind == 4:
                changed[place:place] = self.randbytes(self.randrange(1, 9))
            elif kind == 5:
                end = min(len(changed), place + self.randrange(1, 17))
                changed[place:end] = bytes(end - place)
            elif kind == 6 and self.chance(0.3):
                del changed[place:]
            else:
                end = min(len(changed), place + self.randrange(1, 9))
                changed[place:end] = self.randbytes(end - place)
        return bytes(changed)

    def bytes(self, valid: bytes, most: int = 200) -> bytes:
        """Mostly nearly valid: `valid` itself, damaged, or noise."""
        kind = self.random()
        return valid if kind < 0.15 else self.damaged(valid) if kind < 0.85 else self.randbytes(self.randrange(most))

    def some(self, of: Sequence[T], most: int) -> list[T]:
        """Up to so many, with repetitions."""
        return [self.choice(of) for _ in range(self.randrange(most + 1))]
