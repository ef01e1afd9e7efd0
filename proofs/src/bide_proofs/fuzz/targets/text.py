"""Text that people write: durations, instants, names, retry policies, settings, table sources, SQL expressions."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import ROUND_CEILING, Decimal, localcontext
from typing import Any
from zoneinfo import ZoneInfo

from bide.core import wall_clock
from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, LONGEST, as_datetime, duration, duration_text, instant, instant_text
from bide.core.names import LONGEST_NAME, check_name, check_topic
from bide.core.retry import FOREVER, PRESETS, Exponential, Fixed, Ladder, policy
from bide.core.table_source import DueIs, Sql, TableSource
from bide.settings import Settings, describe
from bide_proofs.fuzz.drawing import Draw
from bide_proofs.fuzz.running import Target, check, pure, refusals

_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_SPACES = " \t\n\r\f\v"
_ISO = {"W": "w", "D": "d", "TH": "h", "TM": "m", "TS": "s"}
ODD_VALUES: tuple[Any, ...] = (None, 0, 15, 1.5, True, b"15m", [], {}, float("nan"), object(), ("15m",))


def length_text(draw: Draw) -> str:
    """A duration as people write them."""
    count = draw.of("1", "0", "15", "90", "1.5", "0.001", "0.0004", "007", str(draw.number()), "99999999999")
    if draw.chance(0.3):
        date = "".join(f"{draw.randrange(40)}{unit}" for unit in "WD" if draw.chance(0.4))
        time = "".join(f"{draw.randrange(90)}{unit}" for unit in "HMS" if draw.chance(0.5))
        return f"P{date}{'T' if time or draw.chance(0.1) else ''}{time}"
    parts = [f"{count}{draw.of('', '', ' ')}{draw.choice(list(_UNITS))}"]
    parts += [f"{draw.randrange(100)}{draw.choice(list(_UNITS))}" for _ in range(draw.randrange(3))]
    return draw.of("", "", "-", "+", " ") + draw.of("", "", " ").join(parts)


def read_length(text: str) -> int | None:
    """A second reading, sign by sign, with decimals; None: it is no duration."""
    text = text.strip()
    sign = -1 if text.startswith("-") else 1
    text = text[1:] if text[:1] in ("-", "+") else text
    if not text or len(text) > 64:
        return None
    iso, in_time, last, order = text.startswith("P"), "", "", list(_ISO)
    seen: list[str] = []
    digits, total, place = "", Decimal(0), 1 if iso else 0
    with localcontext() as exact:
        exact.prec = 400
        while place < len(text):
            letter = text[place]
            if letter in "0123456789.":
                digits += letter
                place += 1
                continue
            if iso and letter == "T" and not digits and not in_time:
                in_time, place = "T", place + 1
                continue
            if not iso and letter in _SPACES:
                place += 1
                if not digits or (place < len(text) and text[place] in "0123456789."):  # within a number
                    return None
                continue
            unit = letter if iso else "ms" if text.startswith("ms", place) else letter
            found = _ISO.get(in_time + unit) if iso else unit
            whole, dot, rest = digits.partition(".")
            if found not in _UNITS or not whole or (dot and not rest) or "." in rest or found in seen:
                return None
            if iso and last and order.index(in_time + unit) < order.index(last):
                return None
            last = in_time + unit
            seen.append(found)
            total += Decimal(digits) * _UNITS[found]
            digits, place = "", place + len(unit)
            while not iso and place < len(text) and text[place] in _SPACES:
                place += 1
        if digits or not seen or (iso and text.endswith("T")):
            return None
        return int((sign * total).to_integral_value(ROUND_CEILING))


def durations(draw: Draw) -> None:
    value: Any = draw.text(length_text(draw))
    if draw.chance(0.05):
        value = draw.choice(ODD_VALUES)
    elif draw.chance(0.1):
        value = timedelta(microseconds=draw.randrange(-(10**12), 10**15))
    negative = draw.chance(0.5)
    draw.note(value)
    meant: int | None = None
    if isinstance(value, timedelta):
        meant = -((-value) // timedelta(milliseconds=1))
    elif isinstance(value, str):
        meant = read_length(value)
    if meant is not None and ((meant < 0 and not negative) or abs(meant) > LONGEST):
        meant = None
    with refusals():
        got = duration(value, negative=negative)
        check(got == meant, f"read as {got}, and it says {meant}")
        check(duration(duration_text(got), negative=True) == got, f"{duration_text(got)!r} does not say {got}")
        return
    check(meant is None, f"refused, and it says {meant}")


def instant_words(draw: Draw) -> tuple[str, int | None]:
    """ISO 8601 with an offset, and what it says; None where that is outside of what is taken."""
    year = draw.of(1970, 2000, 2024, 2030, 9999, 1969, 1, draw.randrange(1, 10_000))
    moment = datetime(  # noqa: DTZ001
                      year, draw.randrange(1, 13), draw.randrange(1, 29), draw.randrange(24), draw.randrange(60),
                      draw.randrange(60), draw.of(0, 1, 999, 1_000, 999_999, draw.randrange(10**6)))  # fmt: skip
    hours, minutes = draw.randrange(15), draw.of(0, 30, 45, draw.randrange(60))
    sign = draw.of(1, -1)
    offset = timedelta(hours=sign * hours, minutes=sign * minutes)
    written = f"{'+' if sign > 0 else '-'}{hours:02}{draw.of(':', ':', '')}{minutes:02}"
    if not offset:
        written = draw.of("Z", "+00:00", "-00:00", written)
    compact = written != "Z" and ":" not in written
    fraction = f"{moment.microsecond:06}" if draw.chance(0.7) else ""
    if not fraction:
        moment = moment.replace(microsecond=0)
    if compact:
        text = f"{moment:%Y%m%dT%H%M%S}".rjust(15, "0")
    else:
        text = f"{moment.year:04}-{moment:%m-%d}{draw.of('T', ' ')}{moment:%H:%M:%S}"
    text += f"{draw.of('.', ',')}{fraction}" if fraction else ""
    micros = (moment - datetime(1970, 1, 1)) // timedelta(microseconds=1) - offset // timedelta(microseconds=1)  # noqa: DTZ001
    millis = -(-micros // 1000)
    return text + written, millis if 0 <= millis <= LAST_INSTANT else None


def instants(draw: Draw) -> None:
    words, meant = instant_words(draw)
    value: Any = draw.text(words)
    if draw.chance(0.05):
        value = draw.choice((*ODD_VALUES, datetime(2030, 1, 1), datetime.max, datetime.min))  # noqa: DTZ001, DTZ901
    elif draw.chance(0.1):
        zone = timezone(timedelta(seconds=draw.randrange(-86_399, 86_400)))
        value = draw.of(datetime.min, datetime.max, datetime(1970, 1, 1), datetime(2030, 1, 1)).replace(tzinfo=zone)  # noqa: DTZ001, DTZ901
    draw.note(value)
    with refusals():
        got = instant(value)
        check(0 <= got <= LAST_INSTANT, f"read as {got}")
        check(instant(instant_text(got)) == got, f"{instant_text(got)!r} does not say {got}")
        check(instant(as_datetime(got)) == got, f"{as_datetime(got)!r} does not say {got}")
        check(value != words or got == meant, f"read as {got}, and it says {meant}")
        return
    check(value != words or meant is None, f"refused, and it says {meant}")


ZONES = (
    "UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "Africa/Casablanca",
    "America/St_Johns", "Pacific/Apia", "Asia/Tehran", "Antarctica/Troll",
)  # fmt: skip


def zones(draw: Draw) -> None:
    """Naive times of a zone: one comes when the zone's clock shows it, or a later one, for good, as told by reading the
    clock every quarter of an hour."""
    zone = ZoneInfo(draw.choice(ZONES))
    spring = datetime(draw.randrange(1971, 2037), draw.of(3, 4, 10, 11, draw.randrange(1, 13)), draw.randrange(1, 29))  # noqa: DTZ001
    shown = spring + timedelta(hours=draw.randrange(24), minutes=draw.randrange(60), microseconds=draw.of(0, 1, 500))
    draw.note(f"{shown} in {zone}")
    at = wall_clock.instant_of(shown, zone)
    check(0 <= at <= LAST_INSTANT, f"comes at {at}")

    def showing(millis: int) -> datetime:
        return as_datetime(millis).astimezone(zone).replace(tzinfo=None)

    check(showing(at) >= shown, f"at {at} the clock shows {showing(at)}")
    if at:
        check(wall_clock.cutoff(at, zone) >= shown, f"at {at} it has not come: {wall_clock.cutoff(at, zone)}")
        check(wall_clock.cutoff(at - 1, zone) < shown, f"it has come before: {wall_clock.cutoff(at - 1, zone)}")
        for quarter in range(1, 13):
            later = at + quarter * 900_000
            check(showing(later) >= shown, f"it comes again: at {later} the clock shows {showing(later)}")
    edge = draw.number() % (LAST_INSTANT + 1)
    check(wall_clock.cutoff(edge, zone) <= datetime.max, "a cutoff is a time")  # noqa: DTZ901


def names(draw: Draw) -> None:
    base = draw.of(
        "order.close", "user-7", "a/b", "键", "é" * 100, "x" * LONGEST_NAME, "x" * (LONGEST_NAME + 1), "bide:settings"
    )
    value: Any = draw.text(base) if draw.chance(0.95) else draw.choice(ODD_VALUES)
    draw.note(value)
    fine = (
        isinstance(value, str)
        and not any(unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") for one in value)
        and 1 <= len(value.encode("utf-8", "surrogatepass")) <= LONGEST_NAME
    )
    own = value in ("bide:settings", "bide:shown")
    reads: tuple[tuple[Callable[[], str], bool], ...] = (
        (lambda: check_name("key", value), fine),
        (lambda: check_topic(value), fine and not own),
    )
    for read, taken in reads:
        passed = False
        with refusals():
            check(read() == value, "changed")
            passed = True
        check(passed == taken, "taken" if passed else "refused")


def retries(draw: Draw) -> None:
    """Policies by name and by their makers: what is made answers with a pause within its bounds, or None, at last."""
    preset: Any = draw.text(draw.choice(list(PRESETS))) if draw.chance(0.9) else draw.choice(ODD_VALUES)
    draw.note(preset)
    passed = False
    with refusals():
        policy(preset)
        passed = True
    check(passed == (preset is None or (isinstance(preset, str) and preset in PRESETS)), "taken or refused")
    tries: Any = draw.of(1, 5, FOREVER, draw.number(), None, 1.0, True, "3")
    factor: Any = draw.of(
        1, 1.0, 2.0, 100.0, 100.1, float("nan"), float("inf"), -1.0, 0, None, "2", True, draw.number()
    )
    jitter: Any = draw.of(0.0, 0.2, 1, 1.1, float("nan"), -0.1, None, "0.2")
    lengths = [draw.text(length_text(draw)) for _ in range(draw.randrange(4))]
    draw.note((tries, factor, jitter, lengths))
    for make in (
        lambda: Fixed(lengths[0] if lengths else "1s", tries=tries),
        lambda: Exponential(
            lengths[0] if lengths else "1s",
            longest=lengths[-1] if lengths else "1h",
            tries=tries,
            factor=factor,
            jitter=jitter,
        ),
        lambda: Ladder(*lengths),
    ):
        with refusals():
            made = make()
            for failures in (1, 2, 3, 50, 1_100, 10**6, FOREVER - 1):
                pause = made.delay(failures, draw.random)
                check(pause is None or 0 <= pause <= LONGEST, f"{made} pauses for {pause} after {failures}")
            check(made.delay(FOREVER) is None, f"{made} never gives up")


def settings(draw: Draw) -> None:
    """The environment: every setting is read as what it says, or refused by its name, and no secret is shown."""
    known = {one.variable: one for one in describe()}
    environ: dict[str, str] = {"PATH": "/bin", "HOME": "/"}
    secret = "s3cr3t" + format(draw.getrandbits(40), "x")
    for _ in range(draw.randrange(1, 4)):
        one = known[draw.choice(list(known))]
        variable = one.variable if draw.chance(0.9) else draw.changed(one.variable)
        value = draw.of(
            "15s",
            "1h30m",
            "100",
            "on",
            "off",
            "normal",
            "full",
            one.default_text,
            length_text(draw),
            str(draw.number()),
        )
        if one.name == "store":
            value = draw.of("memory:", "sqlite:///x.db", f"redis://:{secret}@host/0")
        elif one.secret:
            value = secret
        environ[variable] = draw.text(value)
    if draw.chance(0.1):
        environ["BIDE_TOKEN_FILE"] = draw.of("/nowhere/at/all", "/", "\0", "/proc/self/mem", "")
    draw.note(environ)
    try:
        made = Settings.from_env(environ)
    except BadInput as error:
        with refusals():
            raise
        check(secret not in str(error), "a secret is shown")
        return
    check(secret not in repr(made), "a secret is shown")
    for variable, one in known.items():
        if variable in environ:
            value = getattr(made, one.name)
            check(one.kind.read(one.kind.text(value), one.name) == value, f"{variable} is read as {value!r}")
        else:
            check(
                "BIDE_TOKEN_FILE" in environ or getattr(made, one.name) == one.default, f"{one.name} is not its default"
            )


def tables(draw: Draw) -> None:
    """Table sources: what is taken can be put into a statement: brackets and quotes that match, nothing behind them."""
    where = draw.of(
        "status = 2", "a = 1 AND (b = 'it''s' OR c IS NULL)", '"odd name" > 3', "x in (1, 2)", "note = ':now'"
    )
    change: Any = draw.of(3, "sent", None, 1.5)
    if draw.chance(0.5):
        text = draw.text(draw.of("times + 1", ":now", "coalesce(x, ':now')", "now() + interval '1 day'", "a::text"))
        draw.note(text)
        change = None
        with refusals():
            change = Sql(text)
            one_expression(text)
            check(
                ":now"
                not in re.sub(
                    r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|[:\w]:now|:now\w", "", change.written(lambda: "$1")
                ),
                "a :now is left",
            )
    given: dict[str, Any] = {
        "table": draw.text(draw.of("posts", "blog.posts", "Ünïcode")),
        "due": draw.text("publish_at"),
        "where": draw.text(where) if draw.chance(0.8) else draw.choice(ODD_VALUES),
        "changes": draw.of({draw.text("status"): change}, {"status": 3, "times": change}, {}, None, [], "x"),
        "id": draw.text("id"),
        "columns": draw.of((), ("title",), [draw.text("title")], "title", None, (1,)),
        "due_is": draw.text(draw.choice(list(DueIs))),
        "zone": draw.of(UTC, ZoneInfo("Europe/Berlin"), "UTC", None, timedelta(0)),
        "page": draw.of(1, 100, 10_000, draw.number(), "1", None, True, 1.0),
        "look_every": draw.text(draw.of("1s", "1h", "250ms")) if draw.chance(0.9) else draw.choice(ODD_VALUES),
        "database": draw.of(None, "sqlite:///x.db", 5, b""),
        "channel": draw.of(None, "posts", "", 'a"b', 7, "x" * 64),
    }
    if draw.chance(0.7):  # mostly one thing is wrong at most, so that what is behind it is reached
        sound: dict[str, Any] = {"table": "posts", "due": "at", "where": "status = 2", "changes": {"status": 3}}
        odd = draw.choice(list(given))
        given = sound | {odd: given[odd]}
    draw.note(given)
    with refusals():
        source = TableSource(**given)
        one_expression(source.where)
        for name in (*source.table.split("."), *source.named):
            check(name and not set(name) & set('"`[]\\.\0\n') and len(name) <= 63, f"the name {name!r}")
        check(0 < source.look_every_ms <= 3_600_000, "a look within an hour")


def one_expression(text: str) -> None:
    """Read by its signs: within its brackets it is one expression and ends where the text ends."""
    depth, quote, place = 0, "", 0
    while place < len(text):
        letter, pair = text[place], text[place : place + 2]
        check(letter not in "\\\0", f"{letter!r} in an expression")
        if quote:
            if letter == quote and pair == quote * 2 and quote != "`":
                place += 1
            elif letter == quote:
                quote = ""
        elif letter in "'\"`":
            quote = letter
        else:
            check(letter not in ";?$" and pair not in ("--", "/*"), f"{pair!r} in an expression")
            depth += (letter == "(") - (letter == ")")
            check(depth >= 0, "a bracket closes what is around it")
        place += 1
    check(not depth and not quote, "an open bracket or quote")


TARGETS = (
    Target("durations", "lengths of time as text and timedelta, beside a second reading", pure(durations)),
    Target("instants", "ISO 8601 and datetimes, beside what they were made of", pure(instants)),
    Target("zones", "naive times of zones around changes of the clock", pure(zones)),
    Target("names", "topics, keys, groups", pure(names)),
    Target("retries", "retry policies by name and by their makers", pure(retries)),
    Target("settings", "the environment", pure(settings)),
    Target("tables", "table sources and expressions in SQL", pure(tables)),
)
