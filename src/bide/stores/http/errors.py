"""What an error of the service, or of the way to it, means for the call that met it.

NotSent     nothing was sent, or it was refused on the way: trying again is safe
Lost        it was sent, and no answer came, or none that can be read: only a repeat by its number tells
TooLarge    nothing was done: the call has to be sent in parts
NotAllowed  nothing was done: whoever calls may not do this
"""

from __future__ import annotations

import msgspec

from bide.core.errors import SetupError, StoreError


class NotSent(Exception):
    """There is no connection, or nobody behind it: nothing was done."""


class Lost(Exception):
    """The connection broke, or nothing came in time, after the call was sent."""


class TooLarge(StoreError):
    """Nothing was done: the body has more bytes than are taken. A batch is sent again in parts."""

    def __init__(self) -> None:
        super().__init__("nothing was done: the call has more bytes than the service, or a proxy before it, takes")


class NotAllowed(SetupError, StoreError):
    """Nothing was done: the token is missing, not accepted, or does not allow this.

    A `SetupError`, since somebody has to give another token; and a `StoreError`, so that a worker goes on: a token may
    be given more scopes while it runs.
    """


class _Said(msgspec.Struct):
    """What of an `application/problem+json` matters here."""

    detail: str = ""
    title: str = ""


_read = msgspec.json.Decoder(_Said).decode


def said(body: bytes, kind: str) -> str:
    """The text of an error that did not come from the store calls."""
    if kind == "application/problem+json":
        try:
            problem = _read(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return ""
        return problem.detail or problem.title
    return ""


def not_allowed(status: int, text: str, where: str, *, token: bool) -> NotAllowed:
    """What 401 and 403 mean; the token itself is never shown."""
    if status == 401 and not token:
        return NotAllowed(f"{where} asks for a token: give Bide(url, token=...) or set BIDE_TOKEN")
    if status == 401:
        return NotAllowed(f"{where} does not accept the token: {text or 'it is wrong, has expired or was revoked'}")
    return NotAllowed(f"{where} refused: {text or 'the token does not allow this'}")
