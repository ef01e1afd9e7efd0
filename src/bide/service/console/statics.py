"""Scripts, styles and icons: read once, named by their content, so that a browser keeps them for ever."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from importlib.resources import files

from bide.service.replies import Reply

PATH = "/static/"
_TYPES = {
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
_FOR_EVER = {"cache-control": "public, max-age=31536000, immutable"}


class Statics:
    """The files of `static/`."""

    def __init__(self) -> None:
        folder = files("bide.service.console") / "static"
        self._replies: dict[str, Reply] = {}
        self.addresses: Mapping[str, str] = {}
        """Where each is, by its name."""
        addresses = {}
        for file in folder.iterdir():
            stem, _, kind = file.name.rpartition(".")
            if kind in _TYPES:
                body = file.read_bytes()
                named = f"{stem}.{blake2b(body, digest_size=6).hexdigest()}.{kind}"
                self._replies[named] = Reply(200, body, _TYPES[kind], _FOR_EVER)
                addresses[file.name] = PATH + named
        self.addresses = addresses

    def reply(self, path: str) -> Reply | None:
        """The file at this path; None: there is none."""
        return self._replies.get(path.removeprefix(PATH))
