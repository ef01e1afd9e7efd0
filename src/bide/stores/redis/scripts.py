"""The scripts: what they share and each one's own text, and how a server knows them."""

from __future__ import annotations

from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

_FOLDER = files("bide.stores.redis") / "lua"
DRAINS = frozenset({"change", "lease", "extend", "settle", "purge"})
"""What has to work on a server whose memory is full (P9): only `add` is refused there."""


class Script(NamedTuple):
    """One script as a server is given it."""

    name: str
    text: str
    sha: str


def script(name: str, *, flags: bool) -> Script:
    """The script `name`. `flags`: the server knows script flags (Redis 7, Valkey), so what drains may say so."""
    library = (_FOLDER / "lib.lua").read_text(encoding="utf-8")
    text = library + (_FOLDER / f"{name}.lua").read_text(encoding="utf-8")
    if flags:
        text = f"#!lua{' flags=allow-oom' if name in DRAINS else ''}\n{text}"
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest())
