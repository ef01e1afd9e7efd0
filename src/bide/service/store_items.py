"""The items of a batch, each for itself: what is wrong with one, or fails alone, is no matter of the others."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from bide.core.answers import Answer
from bide.core.errors import BadInput, PartlyFailed
from bide.ports import wire
from bide.ports.wire import Failure
from bide.service import store_checks as checks
from bide.service.callers import AccessRefused, Caller

T = TypeVar("T")
Reply = tuple[Any, dict[int, Failure]]
"""What an operation answers, and which items of it failed."""


def sifted(items: list[T], check: Callable[[Sequence[T]], None]) -> tuple[list[T], dict[int, Failure]]:
    """Those that are in order, and by place what is wrong with the others: clients fold the calls of many into one.

    Raises BadInput, AccessRefused where nothing is left, or there is too much of it.
    """
    checks.check_count("items", items)
    try:
        check(items)
    except (BadInput, AccessRefused):
        if len(items) == 1:
            raise
    else:
        return items, {}
    good: list[T] = []
    wrong: dict[int, Failure] = {}
    for place, item in enumerate(items):
        try:
            check([item])
        except AccessRefused as error:
            wrong[place] = Failure(wire.REFUSED, str(error))
        except BadInput as error:
            wrong[place] = wire.failure_of(error)[1]
        else:
            good.append(item)
    if not good:
        check(items)
    return good, wrong


def merged(reply: Reply, wrong: Mapping[int, Failure]) -> Reply:
    """The answers to those in order, with what was wrong with the others in their places."""
    if not wrong:
        return reply
    answers, failed = reply
    rest, failures = iter(enumerate(answers)), dict(wrong)
    merged: list[object] = []
    for place in range(len(answers) + len(wrong)):
        if place in wrong:
            merged.append(None)
            continue
        was, answer = next(rest)
        merged.append(answer)
        if was in failed:
            failures[place] = failed[was]
    return merged, failures


async def each(
    verb: Coroutine[Any, Any, Sequence[object]], note: Callable[[Sequence[object]], None] = lambda _: None
) -> Reply:
    """The answers of a batch, also of one that partly failed; noted."""
    try:
        answers = await verb
    except PartlyFailed as partly:
        note(partly.answers)
        return wire.split(partly.answers)
    note(answers)
    return answers, {}


def seen(caller: Caller, reply: Reply) -> Reply:
    """The answers as the caller may see them."""
    answers, failed = reply
    return [caller.seen(one) if isinstance(one, Answer) else one for one in answers], failed
