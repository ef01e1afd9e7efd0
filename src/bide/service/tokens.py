"""The tokens that callers of the service show: made, read, kept and revoked.

A token is `bide_<id>_<secret>`: the prefix lets scanners find leaked ones, the id says which it is, the secret is 32
random bytes. Only its SHA-256 is kept. That a fast hash is right here: what makes a password hash slow is there to make
guessing from a short list expensive; among 2^256 equally likely secrets no list is short, and whoever reads the hash
has nothing to try. A slow one would let a caller without a token spend the service's time instead.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from bide.core.errors import BadInput
from bide.core.instants import Millis
from bide.core.names import check_name
from bide.engine.kept import Kept
from bide.service.callers import ALL_VERBS, ANONYMOUS, Verb, check_pattern

PREFIX = "token:"
"""What the names of kept tokens begin with."""
MOST_PATTERNS = 100
LONGEST_TOKEN = 5 + 8 + 1 + 43
"""Characters of every token."""
USUAL = ALL_VERBS - {Verb.ADMIN}
"""What a token may do unless it is said."""

_FORM = re.compile(r"bide_([a-z0-9]{8})_([A-Za-z0-9_-]{43})", re.ASCII)
_ID = re.compile(r"[a-z0-9]{8}", re.ASCII)
_ID_LETTERS = string.ascii_lowercase + string.digits
_TRIES = 8
T = TypeVar("T")


class Token(Struct, frozen=True, kw_only=True):
    """A token as it is kept, in JSON: everything but the secret."""

    id: str
    name: str
    """Who calls with it: what the event log and the audit log call them."""
    hash: str
    """SHA-256 of the whole secret part, in hexadecimal."""
    verbs: tuple[Verb, ...]
    topics: tuple[str, ...]
    created_at: Millis
    expires_at: Millis | None = None
    created_by: str | None = None

    def expired(self, now: Millis) -> bool:
        return self.expires_at is not None and self.expires_at <= now


class Shown(NamedTuple):
    """What a caller sent, in two parts."""

    id: str
    secret: str


def parse(text: str) -> Shown | None:
    """The parts of a token; None when `text` does not have the form of one. O(1)."""
    if len(text) != LONGEST_TOKEN:
        return None
    found = _FORM.fullmatch(text)
    return None if found is None else Shown(found[1], found[2])


def hash_of(secret: str) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def check_id(value: str) -> str:
    """`value`, if it can be a token's id; a whole token is refused without being repeated. Raises BadInput."""
    if _ID.fullmatch(value):
        return value
    shown = "a whole token" if parse(value) is not None else value
    raise BadInput("ID", shown, "the 8 letters and digits that `bide token ls` shows")


def verbs_of(names: Iterable[str]) -> frozenset[Verb]:
    """The verbs of these names; `all` stands for every one, none at all for the usual ones. Raises BadInput."""
    found: set[Verb] = set()
    any_given = False
    for name in names:
        any_given = True
        if name == "all":
            found |= ALL_VERBS
        elif name in ALL_VERBS:
            found.add(Verb(name))
        else:
            raise BadInput("verb", name, f"all, or one of {', '.join(Verb)}")
    return frozenset(found) if any_given else USUAL


class Tokens:
    """The tokens that a store keeps."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept

    async def add(
        self,
        name: str,
        *,
        verbs: frozenset[Verb],
        topics: tuple[str, ...],
        now: Millis,
        expires_at: Millis | None = None,
        by: str | None = None,
    ) -> tuple[Token, str]:
        """Make a token; it, and the text that its owner is told, once. Raises BadInput, StoreFull."""
        check_name("name", name)
        if name == ANONYMOUS:
            raise BadInput("name", name, "another: so are called those who show no token")
        if not 1 <= len(topics) <= MOST_PATTERNS:
            raise BadInput("topic", f"{len(topics)} patterns", f"1 to {MOST_PATTERNS}")
        patterns = tuple(dict.fromkeys(check_pattern(topic) for topic in topics))
        if not verbs:
            raise BadInput("verb", None, f"at least one of {', '.join(Verb)}")
        if expires_at is not None and expires_at <= now:
            raise BadInput("expires", expires_at, "a time that is still to come")
        secret = secrets.token_urlsafe(32)
        for _ in range(_TRIES):
            token = Token(
                id="".join(secrets.choice(_ID_LETTERS) for _ in range(8)), name=name, hash=hash_of(secret),
                verbs=tuple(sorted(verbs, key=list(Verb).index)), topics=patterns, created_at=now,
                expires_at=expires_at, created_by=by,
            )  # fmt: skip
            if await self._kept.put_if_absent(PREFIX + token.id, msgspec.json.encode(token)):
                return token, f"bide_{token.id}_{secret}"
        raise AssertionError(f"{_TRIES} ids in a row are taken, of {len(_ID_LETTERS)}^8")

    async def all(self, damaged: Callable[[str], None] | None = None) -> list[Token]:
        """Every token, the oldest first, expired ones too. `damaged` is told the id of one that cannot be read."""
        found: list[Token] = []
        for name, value in (await self._kept.all(PREFIX)).items():
            try:
                found.append(msgspec.json.decode(value, type=Token))
            except msgspec.MsgspecError:
                if damaged is not None:
                    damaged(name.removeprefix(PREFIX))
        return sorted(found, key=lambda token: (token.created_at, token.id))

    async def revoke(self, id: str) -> bool:
        """Forget the token; whether there was one. Services refuse it within `access.FRESH` at the latest."""
        return await self._kept.remove(PREFIX + check_id(id))
