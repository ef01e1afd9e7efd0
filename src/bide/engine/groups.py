"""A verb over a whole group: pages of `find`, then `change` with `if_token`; what moved meanwhile is read again.

Atomic per task, bounded per store call, and safe to repeat: each task is named with the token it was seen with, so none
is changed twice by one call, however often it has to look again. What has left the group meanwhile is left alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from bide.core.answers import Answer
from bide.core.errors import PartlyFailed, StoreError
from bide.core.records import Change, Filter, Page, Record, Ref, Result
from bide.ports import Verbs

_PAGE = 500
_TRIES = 5


async def over_group(
    verbs: Verbs,
    where: Filter,
    make: Callable[[Record], Change],
    change: Callable[[Sequence[Change]], Awaitable[Sequence[Answer]]],
) -> list[Answer]:
    """`change` with `make(record)` for every live task that matches; one answer each. O(tasks in the group).

    Raises PartlyFailed, with the answers so far and the error behind them, when something was answered before an error.
    """
    answers: list[Answer] = []
    cursor: str | None = None
    try:
        while True:
            found = await verbs.find(where, Page(limit=_PAGE, cursor=cursor))
            live = [record for record in found.tasks if record.state.live]
            for again in reversed(range(_TRIES)):
                if not live:
                    break
                stale: list[Ref] = []
                for answer in await change([make(record) for record in live]):
                    if answer.result is Result.STALE_TOKEN and answer.record is not None and again:
                        stale.append(answer.record.ref)
                    else:
                        answers.append(answer)
                seen = await verbs.get(stale) if stale else []
                live = [one for one in seen if one is not None and one.state.live and one.group == where.group]
            cursor = found.cursor
            if cursor is None:
                return answers
    except StoreError as error:
        if not answers:
            raise
        raise PartlyFailed([*answers, *(error.answers if isinstance(error, PartlyFailed) else [error])]) from error
