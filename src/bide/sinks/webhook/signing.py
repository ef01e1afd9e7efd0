"""Signatures of webhooks as specified by standardwebhooks.com, so that receivers can use its libraries.

`id.timestamp.payload` is signed with HMAC-SHA256, once for each secret: while a secret is being replaced, the receiver
may know the new one or the old one. A second header, `bide-signature`, signs bide's other headers, which the standard
leaves out. A secret is `whsec_` and base64 of 24 to 64 random bytes.
"""

from __future__ import annotations

import binascii
import hmac
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence

from bide.core.errors import BadInput

PREFIX = "whsec_"
SIGNED = ("webhook-id", "webhook-timestamp", "bide-topic", "bide-key", "bide-token", "bide-attempt")
"""The headers that receivers rely on, in the order in which they are signed."""
_LEAST, _MOST = 24, 64
_ACCEPTED = f'"{PREFIX}" followed by base64 of {_LEAST} to {_MOST} random bytes'


class Signer:
    """Signs with each secret, in order: the new one first."""

    __slots__ = ("_keys",)

    def __init__(self, secrets: Sequence[str]) -> None:
        if isinstance(secrets, str):
            raise BadInput("secrets", "(not shown)", "a list of secrets, even for a single one")
        self._keys = tuple(_key_of(secret, place) for place, secret in enumerate(secrets))

    def __bool__(self) -> bool:
        return bool(self._keys)

    def signature(self, id: str, timestamp: str, payload: bytes) -> str:
        """The value of `webhook-signature`: one `v1,...` for each secret. O(payload) for each."""
        return self._signed(f"{id}.{timestamp}.".encode() + payload)

    def signature_of(self, headers: Mapping[str, str]) -> str:
        """The value of `bide-signature`, over the values of `SIGNED`.

        The signed text is lines, the first of them `bide`: since a `webhook-id` contains no line break, neither of the
        two signatures can pass for the other.
        """
        return self._signed("\n".join(["bide", *(headers[name] for name in SIGNED)]).encode())

    def _signed(self, signed: bytes) -> str:
        return " ".join(["v1," + b64encode(hmac.digest(key, signed, "sha256")).decode("ascii") for key in self._keys])

    def __repr__(self) -> str:
        return f"<Signer with {len(self._keys)} secrets>"


def _key_of(secret: object, place: int) -> bytes:
    """Decode a secret. An error names its place but not its value, since errors are logged."""
    field, key = f"secrets[{place}]", b""
    if not isinstance(secret, str) or not secret.startswith(PREFIX):
        raise BadInput(field, "(not shown)", _ACCEPTED)
    encoded = secret.removeprefix(PREFIX)
    try:
        key = b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise BadInput(field, "(not shown)", _ACCEPTED) from None
    if not _LEAST <= len(key) <= _MOST:
        raise BadInput(field, f"(not shown: {len(key)} bytes)", _ACCEPTED)
    return key
