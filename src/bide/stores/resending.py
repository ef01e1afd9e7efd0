"""The policy by which a call is sent again until its outcome is known.

SQL servers, Redis and bide's service keep the last answer of each caller, by the number of the call. So a call whose
answer was lost can be sent again: it is done once, however often that takes. How it is sent, and what an error means,
differs; the pauses, the patience, and the meaning of an error after a lost answer are here.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TypeVar

from bide.core.errors import OutcomeUnknown, StoreError, StoreUnavailable

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
E = TypeVar("E", bound=Exception)


class Resending:
    """One call that has failed once, or may fail."""

    __slots__ = ("_pause", "ends", "may_be_done")

    def __init__(self, patience: float, *, since: float | None = None) -> None:
        """`patience`: seconds in which it is sent again, from `since` on, by the steady clock; None: from now on."""
        self.ends = (time.monotonic() if since is None else since) + patience
        """When patience is over, by the steady clock."""
        self.may_be_done = False
        """True once an answer was lost: an earlier sending may have done it."""
        self._pause = FIRST_PAUSE

    def given_up(self, why: str) -> StoreError:
        """The error of a call that is not sent again."""
        return OutcomeUnknown(why) if self.may_be_done else StoreUnavailable(why)

    def refused(self, refusal: E) -> E | OutcomeUnknown:
        """The error of a call that was refused for good: by itself a refusal says that nothing was done.

        After a lost answer it does not. The server that refuses may be another than the one that did it, as one that is
        just being made a replica; or it refuses for what came about since, a full disk or a right that was taken away.
        Errors that do not come from the store stay.
        """
        if not self.may_be_done or not isinstance(refusal, StoreError) or isinstance(refusal, OutcomeUnknown):
            return refusal
        return OutcomeUnknown(f"an answer was lost, and sent again the call was refused: {refusal}")

    async def pause(self, why: str, *, seconds: float | None = None) -> None:
        """Wait before it is sent again: `seconds`, or twice as long as the last time, jittered.

        Raises OutcomeUnknown or StoreUnavailable, with `why`, once patience is over.
        """
        left = self.ends - time.monotonic()
        if left <= 0:
            raise self.given_up(why)
        if seconds is None:
            seconds, self._pause = self._pause, min(self._pause * 2, LONGEST_PAUSE)
        if seconds:
            await asyncio.sleep(min(left, seconds * (0.5 + random.random())))
