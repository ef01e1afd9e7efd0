"""What may still be said of a call that was sent, and whose answer was lost."""

from __future__ import annotations

from typing import TypeVar

from bide.core.errors import OutcomeUnknown, StoreError

_Error = TypeVar("_Error", bound=Exception)


def refused_later(refusal: _Error) -> _Error | OutcomeUnknown:
    """`refusal`, which the same call met when it was sent again: by itself it says that nothing was done.

    Who refuses may be another server than the one that did it, as one that is just being made a replica; or it refuses
    for what came about since, a full disk or a right that was taken away. Errors that do not come from the store stay.
    """
    if not isinstance(refusal, StoreError) or isinstance(refusal, OutcomeUnknown):
        return refusal
    return OutcomeUnknown(f"an answer was lost, and sent again the call was refused: {refusal}")
