"""Every setting there is: one frozen record, and the one place where the environment is read.

A setting is found in this order: what the code gives (`Bide(lease="15s")`), the environment (`BIDE_LEASE=15s`), the
default. A secret may also come from a file (`BIDE_STORE_FILE=/run/secrets/store`). A `BIDE_*` name that is not a
setting is refused, so that a typing error is not a default in disguise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from msgspec import Struct

from bide.core.errors import BadInput
from bide.core.instants import LONGEST, Millis, duration, duration_text
from bide.core.names import LONGEST_NAME, check_name
from bide.core.payloads import PAYLOAD_LIMIT

PREFIX = "BIDE_"
HOUR: Millis = 3_600_000
DAY: Millis = 86_400_000

# Kubernetes tells every container about every service: one named "bide" or "bide-redis" brings names like ours.
_OF_KUBERNETES = re.compile(
    r"BIDE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


class Kind(Protocol):
    """What values a setting has."""

    @property
    def accepted(self) -> str: ...

    def read(self, value: object, name: str) -> Any:
        """The stored form of what a person gave. Raises BadInput that names `name`."""
        ...

    def check(self, value: object, name: str) -> None:
        """Raises BadInput if `value` is not a stored form."""
        ...

    def text(self, value: Any) -> str:
        """What `read` would read as `value`."""
        ...


class Duration(Struct, frozen=True):
    """A length of time, stored in milliseconds."""

    least: Millis
    most: Millis

    @property
    def accepted(self) -> str:
        bounds = f"from {duration_text(self.least)} to {duration_text(self.most)}"
        if self.most == LONGEST:
            bounds = "that is not negative" if self.least == 0 else f"of at least {duration_text(self.least)}"
        return f'a duration {bounds}, such as "15s" or "1h30m"'

    def read(self, value: object, name: str) -> Millis:
        millis = duration(value, field=name)  # type: ignore[arg-type]  # it refuses what is neither text nor timedelta
        if not self.least <= millis <= self.most:
            raise BadInput(name, value, self.accepted)
        return millis

    def check(self, value: object, name: str) -> None:
        if type(value) is not int or not self.least <= value <= self.most:
            raise BadInput(name, value, f"milliseconds, {self.least} to {self.most}")

    def text(self, value: Millis) -> str:
        return duration_text(value)


class Whole(Struct, frozen=True):
    """A whole number."""

    least: int
    most: int

    @property
    def accepted(self) -> str:
        return f"a whole number from {self.least} to {self.most}"

    def read(self, value: object, name: str) -> int:
        number = value
        if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,18}\s*", value):
            number = int(value)
        self._check(number, value, name)
        assert isinstance(number, int)
        return number

    def check(self, value: object, name: str) -> None:
        self._check(value, value, name)

    def _check(self, number: object, shown: object, name: str) -> None:
        if type(number) is not int or not self.least <= number <= self.most:
            raise BadInput(name, shown, self.accepted)

    def text(self, value: int) -> str:
        return str(value)


class OneOf(Struct, frozen=True):
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def accepted(self) -> str:
        return " or ".join(f'"{word}"' for word in self.words)

    def read(self, value: object, name: str) -> str:
        word = value.strip().lower() if isinstance(value, str) else value
        if not isinstance(word, str) or word not in self.words:
            raise BadInput(name, value, self.accepted)
        return word

    def check(self, value: object, name: str) -> None:
        if value not in self.words:
            raise BadInput(name, value, self.accepted)

    def text(self, value: str) -> str:
        return value


class Url(Struct, frozen=True):
    """Where the tasks are. Which ones there are, the wiring knows; it may hold a password, so it is never shown."""

    accepted: str = 'a store URL such as "sqlite:///bide.db", "redis://localhost:6379/0" or "memory:"'

    def read(self, value: object, name: str) -> str:
        url = value.strip() if isinstance(value, str) else value
        self.check(url, name)
        assert isinstance(url, str)
        return url

    def check(self, value: object, name: str) -> None:
        if not isinstance(value, str):
            raise BadInput(name, value, self.accepted)
        if not re.match(r"[a-z][a-z0-9+]*:", value) or not value.isprintable():
            raise BadInput(name, f"text of {len(value)} characters", self.accepted)

    def text(self, value: str) -> str:
        return value


class Name(Struct, frozen=True):
    """A short text, or nothing."""

    accepted: str = f"1 to {LONGEST_NAME} bytes of text without control characters"

    def read(self, value: object, name: str) -> str:
        return check_name(name, value)

    def check(self, value: object, name: str) -> None:
        if value is not None:
            check_name(name, value)

    def text(self, value: str | None) -> str:
        return "" if value is None else value


class Secret(Struct, frozen=True):
    """A text that is never shown, or nothing."""

    accepted: str = "1 to 1000 printable ASCII characters without spaces"

    def read(self, value: object, name: str) -> str:
        text = value.strip() if isinstance(value, str) else value
        self.check(text, name)
        if not isinstance(text, str):
            raise BadInput(name, f"a {type(value).__name__}", self.accepted)
        return text

    def check(self, value: object, name: str) -> None:
        if value is not None and (not isinstance(value, str) or not re.fullmatch(r"[!-~]{1,1000}", value)):
            shown = f"text of {len(value)} characters" if isinstance(value, str) else f"a {type(value).__name__}"
            raise BadInput(name, shown, self.accepted)

    def text(self, value: str | None) -> str:
        return "" if value is None else value


class Described(Struct, frozen=True):
    """A setting as the documentation shows it."""

    name: str
    kind: Kind
    default: Any
    sentence: str
    secret: bool

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def file_variable(self) -> str | None:
        """Where a secret may be given as the name of a file that holds it."""
        return f"{self.variable}_FILE" if self.secret else None

    @property
    def default_text(self) -> str:
        return "" if self.default is None else self.kind.text(self.default)


def _about(kind: Kind, sentence: str, *, secret: bool = False) -> Mapping[str, Any]:
    return {"kind": kind, "sentence": sentence, "secret": secret}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How this process is set up. Durations are milliseconds. Raises BadInput for a value out of its bounds."""

    store: str = field(
        default="sqlite:///bide.db",
        repr=False,
        metadata=_about(Url(), "Where the tasks are. May hold a password, so it is never shown.", secret=True),
    )
    token: str | None = field(
        default=None,
        repr=False,
        metadata=_about(
            Secret(),
            "What is shown to the service, where `store` is the URL of one; made by `bide token add`. Never shown.",
            secret=True,
        ),
    )
    lease: Millis = field(
        default=10_000,
        metadata=_about(
            Duration(10, DAY),
            "How long a worker holds a task before it must say that it still runs. After a crash the task is delivered "
            "again when this time is over.",
        ),
    )
    max_sleep: Millis = field(
        default=1_000,
        metadata=_about(
            Duration(10, HOUR),
            "The longest that a worker sleeps without asking the store: how late a task may be if a wake-up is lost.",
        ),
    )
    concurrency: int = field(
        default=1000, metadata=_about(Whole(1, 1_000_000), "Deliveries at once in one worker process.")
    )
    topic_concurrency: int = field(
        default=256,
        metadata=_about(
            Whole(1, 1_000_000),
            "Deliveries of one topic at once in one worker process, unless its handler says otherwise.",
        ),
    )
    grace: Millis = field(
        default=30_000,
        metadata=_about(Duration(0, DAY), "How long running handlers have to end when a worker is told to stop."),
    )
    max_past: Millis = field(
        default=LONGEST,
        metadata=_about(
            Duration(0, LONGEST),
            "How far in the past `at` may lie: such a task is due at once. With `1d` a mistyped year is refused.",
        ),
    )
    payload_limit: int = field(
        default=PAYLOAD_LIMIT, metadata=_about(Whole(1, 67_108_864), "The largest payload, in bytes.")
    )
    keep_done: Millis = field(
        default=HOUR,
        metadata=_about(
            Duration(0, LONGEST),
            "How long a task is remembered after it is done, at most 10,000 of a topic and process; 0s forgets it at "
            "once.",
        ),
    )
    keep_cancelled: Millis = field(
        default=HOUR,
        metadata=_about(
            Duration(0, LONGEST),
            "How long a task is remembered after it is cancelled, as many as of done ones; 0s forgets it at once.",
        ),
    )
    keep_dead: Millis = field(
        default=14 * DAY,
        metadata=_about(Duration(0, LONGEST), "How long a dead task is kept for somebody to look at and send again."),
    )
    losses: int = field(
        default=10,
        metadata=_about(
            Whole(1, 1_000_000),
            'Leases in a row that may end without an outcome before the task is dead ("holder lost").',
        ),
    )
    sqlite_synchronous: str = field(
        default="full",
        metadata=_about(
            OneOf(("full", "normal")),
            "What an answer of SQLite survives: with `full` a power cut, with `normal` the death of any process.",
        ),
    )
    history: str = field(
        default="on",
        metadata=_about(
            OneOf(("on", "off")),
            "Whether a process writes down, minute by minute and for a day, how much it did and how late: what the "
            "console shows of the past.",
        ),
    )
    traces: str = field(
        default="on",
        metadata=_about(
            OneOf(("on", "off")),
            "Whether a worker keeps the trace of a task's last exception with the task, its last 4 KB.",
        ),
    )
    actor: str | None = field(
        default=None,
        metadata=_about(Name(), "Who is named in the log of changes that a person makes; without it, nobody."),
    )

    def __post_init__(self) -> None:
        for one in describe():
            one.kind.check(getattr(self, one.name), one.name)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, /, **given: Any) -> Settings:
        """The settings of this process: `given` by the code first, then from `environ`, then the defaults.

        Durations are given as text or timedelta; None means not given. Raises BadInput that names the argument or the
        variable, also for one that is not a setting (with the closest that is).
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
    """All settings, in order: what the documentation is made from."""
    return [
        Described(one.name, one.metadata["kind"], one.default, one.metadata["sentence"], one.metadata["secret"])
        for one in fields(Settings)
    ]


def _from_environment(one: Described, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The variable that gives the setting and its text; an empty one is refused by the kind, not passed over."""
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
            # without its value, which may be a secret
            raise BadInput("environment", variable, _closest(variable, [one.variable for one in described]))


def _closest(name: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches  # here, since it is needed only for what is wrong

    closest = get_close_matches(name, known, n=1, cutoff=0.0)
    return f"a setting of bide's; the closest name is {closest[0]} (all are in docs/settings.md)"
