"""The policy by which a call is sent again until its outcome is known.

SQL servers, Redis and bide's service keep each caller's last answer, with the number of the call. So a call whose
answer was lost can be sent again, any number of times, and takes effect once. How a call is sent, and what an error
means, differs by store. The pauses, the patience, and the meaning of an error after a lost answer are defined here.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TypeVar

from bide.core.errors import OutcomeUnknown, StoreError, StoreUnavailable

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5
E = TypeVar("E", bound=Exception)


class NotSent(Exception):
    """There is no connection to a server that accepts the call: nothing was done, and it is safe to send again."""


class Lost(Exception):
    """The call was sent and no readable answer came: only a resend with its number shows whether it was done."""


class Resending:
    """The resends of one call."""

    __slots__ = ("_pause", "ends", "may_be_done")

    def __init__(self, patience: float, *, since: float | None = None) -> None:
        """`patience`: seconds during which the call is resent, from `since` (monotonic clock; None: now) on."""
        self.ends = (time.monotonic() if since is None else since) + patience
        """The time at which patience ends, by the monotonic clock."""
        self.may_be_done = False
        """True once an answer was lost: the call may have been done."""
        self._pause = FIRST_PAUSE

    def given_up(self, why: str) -> StoreError:
        """The error for a call that is not sent again."""
        return OutcomeUnknown(why) if self.may_be_done else StoreUnavailable(why)

    def refused(self, refusal: E) -> E | OutcomeUnknown:
        """The error for a call that was refused for good. A refusal normally means that nothing was done.

        After a lost answer it does not. The server that refuses may be another one than the server that did the call,
        for example a server that is becoming a replica. Or the reason may be newer than the call: a full disk, or a
        revoked right. Errors that do not come from the store are returned unchanged.
        """
        if not self.may_be_done or not isinstance(refusal, StoreError) or isinstance(refusal, OutcomeUnknown):
            return refusal
        return OutcomeUnknown(f"an answer was lost, and sent again the call was refused: {refusal}")

    async def pause(self, why: str, *, seconds: float | None = None) -> None:
        """Wait before the next send: `seconds`, or twice as long as the last time, with jitter.

        Raises OutcomeUnknown or StoreUnavailable, with `why`, once patience has ended.
        """
        left = self.ends - time.monotonic()
        if left <= 0:
            raise self.given_up(why)
        if seconds is None:
            seconds, self._pause = self._pause, min(self._pause * 2, LONGEST_PAUSE)
        if seconds:
            await asyncio.sleep(min(left, seconds * (0.5 + random.random())))
