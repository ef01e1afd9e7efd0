"""All settings, in one frozen record. This is the only module that reads the environment.

The value of a setting comes from the code (`Bide(lease="15s")`), else the environment (`BIDE_LEASE=15s`), else the
default. A secret may also come from a file (`BIDE_STORE_FILE=/run/secrets/store`). A `BIDE_*` name that is not a
setting is refused, so that a typo does not silently select a default.
"""

# ruff: noqa: RUF009 - `_setting` makes a field, not a default

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from msgspec import Struct

from bide.core.errors import BadInput
from bide.core.instants import LONGEST, Millis, duration, duration_text
from bide.core.names import LONGEST_NAME, check_name
from bide.core.payloads import PAYLOAD_LIMIT

PREFIX = "BIDE_"
HOUR: Millis = 3_600_000
DAY: Millis = 86_400_000

# Kubernetes sets variables for every service in every container; those of a service named "bide" or "bide-redis" look
# like settings.
_OF_KUBERNETES = re.compile(
    r"BIDE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


class Kind(ABC):
    """The kind of values that a setting takes."""

    secret = False
    """True: values must not be shown, and a file may contain the value."""

    def __init__(self, accepted: str) -> None:
        self.accepted = accepted

    def read(self, value: object, name: str) -> Any:
        """The stored form of a value given by a person. Raises BadInput that names `name`."""
        stored = value.strip() if isinstance(value, str) else value
        self.check(stored, name)
        return stored

    @abstractmethod
    def check(self, value: object, name: str) -> None:
        """Raise BadInput if `value` is not a stored form."""

    def text(self, value: Any) -> str:
        """The text that `read` would read as `value`."""
        return "" if value is None else str(value)


class Duration(Kind):
    """A length of time, stored in milliseconds."""

    def __init__(self, least: Millis, most: Millis) -> None:
        self._least, self._most = least, most
        bounds = f"from {duration_text(least)} to {duration_text(most)}"
        if most == LONGEST:
            bounds = "that is not negative" if least == 0 else f"of at least {duration_text(least)}"
        super().__init__(f'a duration {bounds}, such as "15s" or "1h30m"')

    def read(self, value: object, name: str) -> Millis:
        millis = duration(value, field=name)  # type: ignore[arg-type]  # it refuses anything but text and timedelta
        if not self._least <= millis <= self._most:
            raise BadInput(name, value, self.accepted)
        return millis

    def check(self, value: object, name: str) -> None:
        if type(value) is not int or not self._least <= value <= self._most:
            raise BadInput(name, value, f"milliseconds, {self._least} to {self._most}")

    def text(self, value: Millis) -> str:
        return duration_text(value)


class Whole(Kind):
    """A whole number."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        super().__init__(f"a whole number from {least} to {most}")

    def read(self, value: object, name: str) -> Any:
        digits = isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,18}\s*", value)
        return super().read(int(digits[0]) if digits else value, name)

    def check(self, value: object, name: str) -> None:
        if type(value) is not int or not self._least <= value <= self._most:
            raise BadInput(name, value, self.accepted)


class OneOf(Kind):
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        self._words = words
        super().__init__(" or ".join(f'"{word}"' for word in words))

    def read(self, value: object, name: str) -> Any:
        return super().read(value.lower() if isinstance(value, str) else value, name)

    def check(self, value: object, name: str) -> None:
        if value not in self._words:
            raise BadInput(name, value, self.accepted)


class Url(Kind):
    """A store's URL. The wiring knows the schemes."""

    secret = True  # it may hold a password

    def check(self, value: object, name: str) -> None:
        if not isinstance(value, str):
            raise BadInput(name, value, self.accepted)
        if not re.match(r"[a-z][a-z0-9+]*:", value) or not value.isprintable():
            raise BadInput(name, f"text of {len(value)} characters", self.accepted)


class Name(Kind):
    """A short text; may be empty."""

    def read(self, value: object, name: str) -> str:
        return check_name(name, value)

    def check(self, value: object, name: str) -> None:
        if value is not None:
            check_name(name, value)


class Secret(Kind):
    """A text that is never shown; may be empty."""

    secret = True

    def check(self, value: object, name: str) -> None:
        if value is not None and (not isinstance(value, str) or not re.fullmatch(r"[!-~]{1,1000}", value)):
            shown = f"text of {len(value)} characters" if isinstance(value, str) else f"a {type(value).__name__}"
            raise BadInput(name, shown, self.accepted)


class Described(Struct, frozen=True):
    """The description of a setting, for the documentation."""

    name: str
    kind: Kind
    default: Any
    sentence: str

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def file_variable(self) -> str | None:
        """For a secret, the variable that names a file with the value."""
        return f"{self.variable}_FILE" if self.kind.secret else None

    @property
    def default_text(self) -> str:
        return "" if self.default == LONGEST else self.kind.text(self.default)


def _setting(default: Any, kind: Kind, sentence: str) -> Any:
    return field(default=default, repr=not kind.secret, metadata={"kind": kind, "sentence": sentence})


_COUNT = Whole(1, 1_000_000)
_SWITCH = OneOf("on", "off")
_ANY_LENGTH = Duration(0, LONGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of this process. Durations are in milliseconds. Raises BadInput for a value out of bounds."""

    store: str = _setting(
        "sqlite:///bide.db",
        Url('a store URL such as "sqlite:///bide.db", "redis://localhost:6379/0" or "memory:"'),
        "Where the tasks are. May hold a password, so it is never shown.",
    )
    token: str | None = _setting(
        None,
        Secret("1 to 1000 printable ASCII characters without spaces"),
        "The token for the service, if `store` is the URL of one; made by `bide token add`. Never shown.",
    )
    lease: Millis = _setting(
        10_000,
        Duration(10, DAY),
        "How long a worker holds a task before it must extend the lease. After a crash the task is delivered again "
        "when this time is over.",
    )
    max_sleep: Millis = _setting(
        1_000,
        Duration(10, HOUR),
        "The longest time that a worker sleeps without asking the store: how late a task may be if a wake-up is lost.",
    )
    concurrency: int = _setting(1000, _COUNT, "Concurrent deliveries in one worker process.")
    topic_concurrency: int = _setting(
        256, _COUNT, "Concurrent deliveries of one topic in one worker process, unless its handler sets another number."
    )
    grace: Millis = _setting(30_000, Duration(0, DAY), "How long running handlers have to end when a worker stops.")
    max_past: Millis = _setting(
        LONGEST,
        _ANY_LENGTH,
        "How far in the past `at` may lie: such a task is due at once. With `1d` a mistyped year is refused.",
    )
    payload_limit: int = _setting(PAYLOAD_LIMIT, Whole(1, 67_108_864), "The largest payload, in bytes.")
    keep_done: Millis = _setting(
        HOUR,
        _ANY_LENGTH,
        "How long a task is kept after it is done, at most 10,000 per topic and process; 0s deletes it at once.",
    )
    keep_cancelled: Millis = _setting(
        HOUR,
        _ANY_LENGTH,
        "How long a task is kept after it is cancelled, with the same limit as done ones; 0s deletes it at once.",
    )
    keep_dead: Millis = _setting(14 * DAY, _ANY_LENGTH, "How long a dead task is kept, for inspection and redrive.")
    losses: int = _setting(
        10, _COUNT, 'How many leases in a row may end without an outcome before the task is dead ("holder lost").'
    )
    sqlite_synchronous: str = _setting(
        "full",
        OneOf("full", "normal"),
        "What an answer of SQLite survives: with `full` a power cut, with `normal` the death of any process.",
    )
    history: str = _setting(
        "on",
        _SWITCH,
        "Whether a process records for each minute, for a day, how much it did and how late: the history in the "
        "console.",
    )
    traces: str = _setting(
        "on", _SWITCH, "Whether a worker keeps the last 4 KB of the trace of a task's last exception with the task."
    )
    actor: str | None = _setting(
        None,
        Name(f"1 to {LONGEST_NAME} bytes of text without control characters"),
        "The name in the event log for changes by this process; without it those changes are not logged.",
    )

    def __post_init__(self) -> None:
        for one in describe():
            one.kind.check(getattr(self, one.name), one.name)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, /, **given: Any) -> Settings:
        """The settings of this process: from `given`, else from `environ`, else the defaults.

        Durations are given as text or timedelta; None means not given. Raises BadInput that names the argument or
        variable; for an unknown name it also names the closest setting.
        """
        known = {one.name: one for one in describe()}
        for name in given:
            if name not in known:
                raise BadInput("settings", name, _closest(name, list(known)))
        _refuse_unknown(environ)
        values: dict[str, Any] = {}
        for one in known.values():
            if given.get(one.name) is not None:
                values[one.name] = one.kind.read(given[one.name], one.name)
            elif (found := _from_environment(one, environ)) is not None:
                values[one.name] = one.kind.read(found[1], found[0])
        return cls(**values)


def describe() -> list[Described]:
    """All settings in order, the source of the documentation."""
    return [
        Described(one.name, one.metadata["kind"], one.default, one.metadata["sentence"]) for one in fields(Settings)
    ]


def _from_environment(one: Described, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The variable that sets the setting, and its text. An empty text is not skipped; the kind refuses it."""
    direct = environ.get(one.variable)
    path = environ.get(one.file_variable) if one.file_variable else None
    if one.file_variable is None or path is None:
        return None if direct is None else (one.variable, direct)
    if direct is not None:
        raise BadInput(one.file_variable, path, f"only one of {one.variable} and {one.file_variable}")
    try:
        with open(path, encoding="utf-8") as file:
            return one.file_variable, file.read().rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise BadInput(one.file_variable, path, f"the path of a readable text file ({error})") from None


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    described = describe()
    known = {variable for one in described for variable in (one.variable, one.file_variable)}
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in known and not _OF_KUBERNETES.fullmatch(variable):
            # the error leaves out the value, which may be a secret
            raise BadInput("environment", variable, _closest(variable, [one.variable for one in described]))


def _closest(name: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches  # imported here, since only an error needs it

    closest = get_close_matches(name, known, n=1, cutoff=0.0)
    return f"a setting of bide's; the closest name is {closest[0]} (all are in docs/settings.md)"
