"""A task as it must be by now, as far as that can be known.

What somebody was shown is a `Seen`. What nobody was shown is an `Unsure`: what is not known of it is `ANY`, or a range
(earliest, latest).
"""

from __future__ import annotations

from typing import Any, TypeAlias

from bide.core.instants import Millis
from bide.core.records import State
from bide.testing.history.events import Seen
from bide.testing.history.gathered import NEVER

_WAITING, _LEASED = State.WAITING, State.LEASED
Wrong: TypeAlias = tuple[Any, ...] | None
"""A promise, a text, and its values; None: all is right."""


class _Any:
    def __repr__(self) -> str:
        return "?"


ANY: Any = _Any()
_NAMES = Seen.__struct_fields__


class Unsure:
    """A task as it must be, as far as it can be known; the fields of `Seen`."""

    __slots__ = _NAMES

    id: Any
    state: State
    due_at: Any
    wake_at: Any
    planned_at: Any
    attempt: Any
    failures: Any
    losses: Any
    token: Any
    created_at: Any
    group: Any
    deadline: Any
    finished_at: Any
    keep_until: Any
    error: Any

    def __init__(self, old: Task, **changed: Any) -> None:
        for name in _NAMES:
            setattr(self, name, changed[name] if name in changed else getattr(old, name))

    @property
    def known(self) -> tuple[Any, ...]:
        """All its fields: what tells it from another."""
        return tuple(getattr(self, name) for name in _NAMES)

    def __repr__(self) -> str:
        return f"Unsure{self.known}"


Task: TypeAlias = Seen | Unsure
NOBODY = Seen("", _WAITING, 0, 0, 0, 0, 0, 0, 0, 0)


def same(known: Any, told: Any) -> bool:
    """True if a field may have the value that was told."""
    if known == told or known is ANY:
        return True
    return type(known) is tuple and told is not None and bool(known[0] <= told <= known[1])


def earliest(known: Any) -> Millis:
    """The least that a time may be."""
    least: Millis = 0 if known is ANY or known is None else known[0] if type(known) is tuple else known
    return least


def latest(known: Any) -> Millis:
    most: Millis = NEVER if known is ANY else 0 if known is None else known[1] if type(known) is tuple else known
    return most


def sentence(wrong: tuple[Any, ...]) -> str:
    """The violation, in words."""
    text: str = wrong[1] % tuple(map(_shown, wrong[2:]))
    return text


def _shown(value: Any) -> Any:
    if type(value) is tuple:
        return f"{value[0]} or later" if value[1] >= NEVER else f"{value[0]} to {value[1]}"
    if type(value) is not Seen and type(value) is not Unsure:
        return value
    if value is NOBODY:
        return "there was no task: never, or ended and forgotten"
    if value.state in (_WAITING, _LEASED):
        return f"the task was {value.state}, with token {value.token}, to wake at {_shown(value.wake_at)}"
    return f"the task had ended: {value.state} at {_shown(value.finished_at)}, with token {value.token}"


def differs(task: Task, seen: Seen) -> str | None:
    """The first field in which a task cannot be what was shown. O(1)."""
    if task is seen or task == seen:
        return None
    for name in _NAMES:
        if not same(getattr(task, name), getattr(seen, name)):
            return name
    return None
