"""Stored tasks that fuzzing found to stop more than themselves."""

from __future__ import annotations

import pytest
from msgspec import json

from bide.core.records import Record, State
from bide.service.schemas import one_line, task_shape
from bide.testing.clock import FIRST_INSTANT
from bide_proofs.fuzz.drawing import Draw
from bide_proofs.fuzz.targets.stored import a_record, worked_on


def damaged(**given: object) -> Record:
    return a_record(Draw("sound"), state=State.LEASED, key="k", finished_at=None, keep_until=None, **given)


@pytest.mark.parametrize(
    "record",
    [
        damaged(due_at=2**48 - 1, wake_at=2**62),
        damaged(created_at=-(2**62), deadline=2**62),
        damaged(token=-(2**63)),
        damaged(options=b"\x81\xa7headers\x81\xa1a\xa1\xff"),
        damaged(payload=b"1e999"),
    ],
)
def test_a_damaged_task_can_be_shown_and_settled(record: Record) -> None:
    worked_on(record)


def test_a_name_that_no_utf8_can_say_is_shown_escaped() -> None:
    shown = task_shape(a_record(Draw("odd"), topic="\udcfft", key="é\udc80"))
    line = json.decode(one_line(shown))
    assert (line["topic"], line["key"]) == ("\\udcfft", "é\\udc80")
    assert line["due_at"] == task_shape(damaged(due_at=FIRST_INSTANT)).due_at
