"""The policy that turns the end of a delivery into a settlement: retries, the deadline, the limit on losses.

Pure functions. No store decides whether a task is delivered again; of recurring tasks, `occurrences` does.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from itertools import dropwhile
from linecache import getline, lazycache
from traceback import walk_tb
from types import FrameType

from bide.core.instants import In, Millis, instant_text, resolved
from bide.core.names import LONGEST_TEXT, TRACE, error_text, new_id, storable
from bide.core.options import known_options
from bide.core.outcomes import Dead, Defer, Done, End, Outcome, Retry
from bide.core.records import OutcomeKind, Record, Settlement, State
from bide.engine.config import Retention
from bide.engine.delivery.occurrences import REMEMBERED, deadline_of, next_life
from bide.ports import Clock, Policy

_LOST, _OVER = "holder lost: ", "deadline: not after "
UNDELIVERED = (_LOST, _OVER)
"""Prefixes of the error of a task that died without a delivery."""


def reject_reason(record: Record, route: Policy, now: Millis) -> str | None:
    """The reason why a leased task must no longer be delivered; None: deliver it."""
    if record.losses >= route.losses:
        return f"{_LOST}{record.losses} leases in a row ended unsettled"
    deadline = deadline_of(record)
    if deadline is not None and now > deadline:
        return f"{_OVER}{instant_text(deadline)}"
    return None


def settlement_for(
    record: Record, ended: End, route: Policy, keep: Retention, clock: Clock, *, traces: bool = False
) -> Settlement:
    """Decide the settlement.

    `traces`: append the traceback of that exception to the text of the error.
    """
    if ended is None or isinstance(ended, Done):
        return completion(record, ended, keep, clock)
    decided = _failed_or_deferred(record, ended, route, keep, clock, traces)
    if decided.outcome is OutcomeKind.DEAD and record.options:
        return next_life(record, keep, clock.now(), decided) or decided
    return decided


def _failed_or_deferred(
    record: Record, ended: Outcome | BaseException, route: Policy, keep: Retention, clock: Clock, traces: bool
) -> Settlement:
    now, grain = clock.now(), clock.grain
    if isinstance(ended, Dead):
        return dead(record, ended.why, keep, now, failed=True)
    if isinstance(ended, Defer):
        due = resolved(ended.due, now, grain)
        if _too_late(record, due.resolve(now)):
            return dead(record, "deadline: deferred past it", keep, now)
        return Settlement(record.topic, record.key, record.token, OutcomeKind.DEFER, due)
    error = (ended.why or "retry asked for") if isinstance(ended, Retry) else error_text(ended)
    trace = trace_of(ended) if traces and not isinstance(ended, Outcome) else ""
    pause = _pause(record, route)
    if pause is None:
        return dead(record, error, keep, now, failed=True, trace=trace)
    due = resolved((ended.due if isinstance(ended, Retry) else None) or In(pause), now, grain)
    if _too_late(record, due.resolve(now)):
        why = f"deadline: the next try would be after it; last error: {error}"
        return dead(record, why, keep, now, failed=True, trace=trace)
    return Settlement(record.topic, record.key, record.token, OutcomeKind.RETRY, due, error=error + trace)


def completion(record: Record, done: Done | None, keep: Retention, clock: Clock) -> Settlement:
    """The settlement of a success: the task is done, or begins its next life.

    An occurrence that is a task of its own ends with its first success.
    """
    own = bool(record.options) and known_options(record.options).occurrence is not None
    if done is not None and done.again is not None and not own:
        again = resolved(done.again, clock.now(), clock.grain)
        return Settlement(record.topic, record.key, record.token, OutcomeKind.DONE, again, next_id=new_id())
    if record.options and (life := next_life(record, keep, clock.now())) is not None:
        return life
    keep_until = keep.keep_until(State.DONE, clock.now()) if keep.done else 0
    if own:
        keep_until = max(keep_until, clock.now() + REMEMBERED)
    return Settlement(record.topic, record.key, record.token, OutcomeKind.DONE, None, keep_until)


def dead(
    record: Record, why: str, keep: Retention, now: Millis, *, failed: bool = False, trace: str = ""
) -> Settlement:
    """The settlement of a dead task, kept by the retention for dead tasks. `failed`: count a failed delivery."""
    kept, error = keep.keep_until(State.DEAD, now), why[:LONGEST_TEXT] + trace
    return Settlement(record.topic, record.key, record.token, OutcomeKind.DEAD, None, kept, error, failed=failed)


def release(record: Record) -> Settlement:
    """The settlement of a lease that was not begun: due again at once, and no delivery is counted."""
    return Settlement(record.topic, record.key, record.token, OutcomeKind.DEFER, In(0))


def _pause(record: Record, route: Policy) -> Millis | None:
    own = known_options(record.options).retry if record.options else None
    return (own or route.retry).delay(record.failures + 1)


def _too_late(record: Record, at: Millis) -> bool:
    deadline = deadline_of(record)
    return deadline is not None and at > deadline


LONGEST_TRACE = 4_096
"""The number of characters kept of a traceback, from its end."""
_MOST_FRAMES, _MOST_CAUSES = 20, 4
_ON_THE_WAY = ("bide.engine.", "bide.sinks.handlers", "bide.sinks.traced")
"""Modules that call handlers; a kept traceback begins after their frames."""


def trace_of(error: BaseException) -> str:
    """The traceback of `error`, preceded by its causes, to be appended to its text; empty if it was never raised.

    Contains lines of source and no values of variables: at most 4 causes with 20 frames each, and only the first error
    of a group. O(depth): 4 us for one frame, 20 us for ten with a cause. A file is read on the loop at its first use.
    """
    links: list[str] = []
    at: BaseException | None = error
    try:
        while at is not None and len(links) <= _MOST_CAUSES:
            frames = deque(dropwhile(_on_the_way, walk_tb(at.__traceback__)), maxlen=_MOST_FRAMES)
            said = f"{error_text(at)[:400]}\n\nwhich led to:\n\n" if links else ""
            links.append("".join([_place(frame, line) for frame, line in frames]) + said)
            cause = at.__cause__ if at.__suppress_context__ else at.__cause__ or at.__context__
            at = at.exceptions[0] if isinstance(at, BaseExceptionGroup) else cause
    except Exception:  # noqa: BLE001 - a faulty exception class or loader: keep the error's text alone
        return ""
    text = storable("".join(reversed(links)))
    if len(text) > LONGEST_TRACE:
        text = "  ...\n" + text[-LONGEST_TRACE:].partition("\n")[2]
    return f"{TRACE}Traceback (most recent call last):\n{text}" if text else ""


def _place(frame: FrameType, line: int) -> str:
    code = frame.f_code
    lazycache(code.co_filename, frame.f_globals)  # the loader reads source inside an archive
    return _written(code.co_filename, line, code.co_name)


@lru_cache(maxsize=1_024)
def _written(file: str, line: int, name: str) -> str:
    """The line as it was at its first use, which matches the running code better than a file changed since."""
    source = getline(file, line).strip()[:400]
    return f'  File "{file}", line {line}, in {name}\n' + (f"    {source}\n" if source else "")


def _on_the_way(place: tuple[FrameType, int]) -> bool:
    return str(place[0].f_globals.get("__name__")).startswith(_ON_THE_WAY)
