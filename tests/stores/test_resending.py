"""The errors of a call that is sent again: after a lost answer none of them says that nothing was done."""

from __future__ import annotations

import pytest

from bide.core.errors import BadInput, OutcomeUnknown, StoreError, StoreFull, StoreUnavailable
from bide.stores.resending import Resending


def test_a_refusal_says_that_nothing_was_done_unless_an_answer_was_lost() -> None:
    resending, full, bad = Resending(10.0), StoreFull("full"), BadInput("task", "x", "a task")
    assert resending.refused(full) is full
    resending.may_be_done = True
    assert type(resending.refused(full)) is OutcomeUnknown
    assert resending.refused(bad) is bad, "that is no error of the store's"
    unknown = OutcomeUnknown("?")
    assert resending.refused(unknown) is unknown


@pytest.mark.parametrize(("may_be_done", "kind"), [(False, StoreUnavailable), (True, OutcomeUnknown)])
async def test_once_patience_is_over_it_is_not_sent_again(may_be_done: bool, kind: type[StoreError]) -> None:
    resending = Resending(-1.0)
    resending.may_be_done = may_be_done
    with pytest.raises(StoreError, match="away") as raised:
        await resending.pause("away")
    assert type(raised.value) is kind


async def test_within_patience_a_pause_may_be_none_at_all() -> None:
    resending = Resending(3_600.0)
    await resending.pause("away", seconds=0.0)
    await resending.pause("away")
