"""The rules of recurring tasks: frozen records that encode small, and pure functions of time.

A *nominal* instant is one that the rule itself names; with jitter, each key fires at its own fixed distance after it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import date
from functools import lru_cache, partial
from itertools import islice
from typing import Annotated, Any, Self, TypeAlias, TypedDict, TypeVar, Unpack

from msgspec import Meta, Struct, ValidationError, convert, structs

from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, Length, Millis, When, duration, duration_text, instant, instant_text
from bide.core.recurrence import zones
from bide.core.recurrence.cron import cron_times, cron_words
from bide.core.recurrence.ical import RRuleTimes, read_rrule, rrule_times
from bide.core.recurrence.pattern import EPOCH_DAY, MOST_LOOKS, Pattern
from bide.core.recurrence.zones import DAY, OnGap, OnRepeat, Times, zone_info

R = TypeVar("R", bound="_Recurrence")
_Instant: TypeAlias = Annotated[int, Meta(ge=0, le=LAST_INSTANT)]
_MOST_COUNTED, _FARTHEST = 10_000, 400 * 366 * DAY
"""The most `times` of a rule of wall-clock times, and the most by which the last may lie after the start."""


class Bounds(TypedDict, total=False):
    """The optional arguments of all rules; the fields of a rule say what they mean."""

    start: When | None
    until: When | None
    times: int | None
    jitter: Length | None
    except_on: Iterable[date | str] | None
    on_gap: OnGap | None
    on_repeat: OnRepeat | None


class _Recurrence(Struct, frozen=True, omit_defaults=True, cache_hash=True, gc=False, kw_only=True):
    """The fields and functions of every rule. `start` and `until` may be occurrences themselves."""

    zone: str = "UTC"
    start: _Instant | None = None
    until: _Instant | None = None
    times: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    """The number of occurrences from the start on."""
    last: _Instant | None = None
    """The last of those that `times` or the COUNT of an RRULE lets pass; None: they are not counted, or end before."""
    jitter: Annotated[int, Meta(ge=0, le=DAY)] = 0
    except_on: tuple[int, ...] = ()
    """Sorted local dates without occurrences, as days since 1970-01-01."""
    on_gap: OnGap | None = None
    """None, as in `on_repeat`: as is usual for the form of the rule."""
    on_repeat: OnRepeat | None = None

    def step(self, after: Millis) -> Millis | None:
        """The next instant of the rule without its bounds."""
        raise NotImplementedError

    def between(self, start: When | None, until: When | None) -> Self:
        """The same rule from `start` until `until`; None leaves a bound as it is. Raises BadInput."""
        changed = structs.replace(self, **_bounds(self.zone, {"start": start, "until": until}))
        return _checked(changed, "start, until", (start, until))

    def after(self, instant: Millis) -> Millis | None:
        """The first nominal instant strictly later than `instant`; None if the rule has ended."""
        return _after(self, instant)

    def fires_at(self, nominal: Millis, key: str) -> Millis:
        """The instant at which a nominal one fires for a key. It is earlier than the next nominal instant."""
        if not self.jitter:
            return nominal
        noise = int.from_bytes(hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest())
        late, following = noise % self.jitter, self.after(nominal)
        if following is not None and nominal + late >= following:
            late = noise % (following - nominal)
        return min(nominal + late, LAST_INSTANT)

    def nominal(self, due_at: Millis, key: str) -> Millis:
        """The nominal instant that fires at `due_at` for a key; `due_at` itself if there is none."""
        found = self.coming(due_at - 1, key) if self.jitter else None
        return due_at if found is None or self.fires_at(found, key) != due_at else found

    def coming(self, now: Millis, key: str) -> Millis | None:
        """The nominal instant that fires next for a key, after `now`. With jitter it may have passed already."""
        found = self.latest(max(0, now - self.jitter + 1), now, 1) if self.jitter else []
        return found[0] if found and self.fires_at(found[0], key) > now else self.after(now)

    def latest(self, first: Millis, last: Millis, most: int) -> list[Millis]:
        """The last `most` nominal instants in [first, last]. O(most + log(last - first)) steps."""
        low, high = first - 1, last
        while low < high:  # bisect for the last one
            middle = (low + high) // 2
            following = _next(self, middle)
            if following is not None and following <= last:
                low = following
            else:
                high = middle
        found, start, length = deque([low][: low >= first], most), low, 1_000
        while found and len(found) < most and start > first:
            start, length = max(first, low - length), 4 * length
            found = deque(self._within(start, low), most)
        return list(found)

    def upto(self, first: Millis, last: Millis, most: int) -> list[Millis]:
        """The nominal instants from `first` to `last`, both included: at most the first `most` of them."""
        return list(islice(self._within(first, last), most))

    def _within(self, first: Millis, last: Millis) -> Iterator[Millis]:
        at = _next(self, first - 1)
        while at is not None and at <= last:
            yield at
            at = _next(self, at)

    def is_shifted(self, nominal: Millis) -> bool:
        """Return whether the instant stands for a wall-clock time inside a gap."""
        return False


class _WallClockRule(_Recurrence, frozen=True):
    """A rule of wall-clock times in a zone. One that names times of day is *fixed*, other than one of intervals."""

    text: str

    def _times(self) -> Pattern | RRuleTimes:
        raise NotImplementedError

    @property
    def gap(self) -> OnGap:
        """The treatment of a time inside a gap."""
        return self.on_gap or ("run_after" if self._times().fixed else "skip")

    @property
    def words(self) -> str:
        """The rule in English, as of every rule."""
        return f'{self.__struct_config__.tag} "{self.text}" in {self.zone}'

    def _search(self) -> Times:
        """The stream of local times for one step, without those of excepted dates."""
        times = partial(self._times().first, iter(range(MOST_LOOKS)))

        def kept(local: Millis) -> Millis | None:
            while (found := times(local)) is not None and found // DAY in self.except_on:
                local = (found // DAY + 1) * DAY
            return found

        return kept if self.except_on else times

    def step(self, after: Millis) -> Millis | None:
        on_repeat = self.on_repeat or ("first" if self._times().fixed else "both")
        return zones.next_step(self._search(), self.zone, after, self.gap, on_repeat)

    def is_shifted(self, nominal: Millis) -> bool:
        held = zones.segment(self.zone, nominal)
        return nominal == held.start and self.gap == "run_after" and zones.gap_time(self._search(), held) is not None


class CronRule(_WallClockRule, frozen=True, tag="cron"):
    """The times that match a cron expression."""

    def _times(self) -> Pattern:
        return cron_times(self.text)

    @property
    def words(self) -> str:
        words = cron_words(self.text)
        return super().words if words is None else f"{words}, {self.zone}"


class RRuleRule(_WallClockRule, frozen=True, tag="rrule"):
    """The times of a recurrence rule of iCalendar, counted from the local time `begin`."""

    begin: Annotated[int, Meta(ge=zones.FIRST_LOCAL, le=LAST_INSTANT)]

    def _times(self) -> RRuleTimes:
        return rrule_times(self.text, self.begin)


class EveryRule(_Recurrence, frozen=True, tag="every"):
    """A fixed length of real time, from the start or the Unix epoch. The zone decides which dates are excluded."""

    length: Annotated[int, Meta(ge=1_000)]

    def step(self, after: Millis) -> Millis | None:
        at = after + 1 + ((self.start or 0) - after - 1) % self.length
        while self.except_on and at <= LAST_INSTANT:
            held = zones.segment(self.zone, at)
            if (at + held.offset) // DAY not in self.except_on:
                break
            left = min(held.end - at, DAY - (at + held.offset) % DAY)
            at += -(-left // self.length) * self.length
        return at if at <= LAST_INSTANT else None

    @property
    def words(self) -> str:
        return f"every {duration_text(self.length)}"


class AtRule(_Recurrence, frozen=True, tag="at"):
    """A list of instants."""

    instants: tuple[_Instant, ...]

    def step(self, after: Millis) -> Millis | None:
        ahead = self.instants[bisect_right(self.instants, after) :]
        return next((at for at in ahead if at // DAY not in self.except_on), None)

    @property
    def words(self) -> str:
        more = len(self.instants) - 1
        return f"at {instant_text(self.instants[0])}" + (f" and {more} more" if more else "")


_TYPES = {field.name: field.type for field in structs.fields(_Recurrence)}
_ACCEPTED = {
    "times": "1 to 100,000", "jitter": "at most a day", "on_gap": '"run_after" or "skip"',
    "on_repeat": '"first", "second" or "both"',
}  # fmt: skip
Rule: TypeAlias = CronRule | EveryRule | RRuleRule | AtRule


def Cron(text: str, *, zone: str = "UTC", **bounds: Unpack[Bounds]) -> CronRule:  # noqa: N802
    """A rule of a cron expression such as "0 8 * * mon-fri". Raises BadInput that names the field at fault."""
    if not isinstance(text, str):
        raise BadInput("cron", text, 'text such as "0 8 * * mon-fri"')
    cron_times(text)
    return _checked(CronRule(text=text.strip(), zone=zone, **_bounds(zone, bounds)), "cron", text)


def Every(length: Length, *, zone: str = "UTC", **bounds: Unpack[Bounds]) -> EveryRule:  # noqa: N802
    """A rule of real time: each `length`, at least a second, from the start or the Unix epoch. Raises BadInput."""
    if (millis := duration(length, field="every")) < 1_000:
        raise BadInput("every", length, "a second or more")
    return _checked(EveryRule(length=millis, zone=zone, **_bounds(zone, bounds)), "every", length)


def RRule(text: str, *, zone: str = "UTC", **bounds: Unpack[Bounds]) -> RRuleRule:  # noqa: N802
    """A rule of RFC 5545 such as "FREQ=MONTHLY;BYDAY=-1FR", from the start or a DTSTART. Raises BadInput."""
    rule, begin, named, until = read_rrule(text)
    if named is not None and zone not in ("UTC", named):
        raise BadInput("zone", zone, f"{named}, as DTSTART has it, or none")
    zone = named or zone
    fields = _bounds(zone, bounds)
    if "start" in fields:
        local = _local(fields["start"], zone)
        if begin not in (None, local):
            raise BadInput("start", bounds["start"], "the same time as DTSTART, or only one of the two")
        begin = local
    if begin is None:
        raise BadInput("start", None, "the instant from which the rule counts, or a DTSTART in its text")
    if until is not None:
        fields["until"] = min(fields.get("until", until), until)
    return _checked(RRuleRule(text=rule, begin=begin, zone=zone, **fields), "rrule", text)


def At(*instants: When | Iterable[When], **bounds: Unpack[Bounds]) -> AtRule:  # noqa: N802
    """A rule of instants, which are given one by one or as a list. Raises BadInput."""
    given = [one for some in instants for one in _each(some, "at")]
    if not given:
        raise BadInput("at", "0 instants", "one or several instants")
    at = tuple(sorted({instant(one) for one in given}))
    return _checked(AtRule(instants=at, **_bounds("UTC", bounds)), "at", given)


def rule_of(text: str, *, zone: str = "UTC", **bounds: Unpack[Bounds]) -> Rule:
    """The rule of a text: "0 8 * * *", "@daily", "every 15m", "FREQ=DAILY". Raises BadInput."""
    word, *rest = str(text).split(maxsplit=1) or [""]
    if word.lower() == "every" and rest:
        return Every(rest[0], zone=zone, **bounds)
    if word.upper().startswith(("FREQ=", "RRULE:", "DTSTART")):
        return RRule(text, zone=zone, **bounds)
    if not (rest or word.startswith("@")):
        raise BadInput("rule", text, '"0 8 * * mon-fri" or the like, "@daily", "every 15m", or "FREQ=DAILY" (RFC 5545)')
    return Cron(text, zone=zone, **bounds)


def _each(given: object, field: str) -> list[Any]:
    """The values that were given, one or several. Raises BadInput."""
    if isinstance(given, str | date):
        return [given]
    if not isinstance(given, Iterable):
        raise BadInput(field, given, f"one or several {'dates' if field == 'except_on' else 'instants'}")
    return list(given)


def _bounds(zone: str, bounds: Bounds) -> dict[str, Any]:
    """The fields of the bounds that are given, each checked by itself."""
    fields = dict[str, Any]()
    for name, given in bounds.items():
        if name not in Bounds.__annotations__:
            raise BadInput(name, given, f"{', '.join(Bounds.__annotations__)} to this rule")
        if given is None:
            continue
        value: Any = given
        if name in ("start", "until"):  # with a zone, unless the rule is of UTC, which is the default
            value = instant(value, field=name, zone=None if zone == "UTC" else zone)
        elif name == "jitter":
            value = duration(value, field=name)
        elif name == "except_on":
            value = tuple(sorted({_day(one) for one in _each(value, name)}))
        try:
            fields[name] = convert(value, _TYPES[name])
        except ValidationError:
            raise BadInput(name, given, _ACCEPTED[name]) from None
    return fields


def _day(given: object) -> int:
    try:
        day: date = date.fromisoformat(given) if isinstance(given, str) else convert(given, date)
    except (ValueError, ValidationError):
        raise BadInput("except_on", given, 'dates, or ISO text such as "2030-12-25"') from None
    return day.toordinal() - EPOCH_DAY


def _checked(rule: R, field: str, given: object) -> R:
    """Return the rule. Raises BadInput for bounds that do not fit it, and for a rule that never fires."""
    zone_info(rule.zone)
    if rule.times is not None and rule.start is None and isinstance(rule, CronRule | EveryRule):
        raise BadInput("times", rule.times, "a start with it, from which the occurrences are counted")
    if (rule.on_gap or rule.on_repeat) and isinstance(rule, EveryRule | AtRule):
        raise BadInput("on_gap, on_repeat", (rule.on_gap, rule.on_repeat), "neither: this rule is one of real time")
    if rule.until is not None and rule.start is not None and rule.until < rule.start:
        raise BadInput("until", instant_text(rule.until), "an instant that is not before the start")
    rule = structs.replace(rule, last=None)
    rule = structs.replace(rule, last=_last(rule))
    if _next(rule, -1) is None:
        raise BadInput(field, given, "a rule that fires: within its bounds, this one never does")
    return rule


def _last(rule: _Recurrence) -> Millis | None:
    """The last of the counted times. None: they are not counted, or the rule ends before. Raises BadInput."""
    counts = [] if rule.times is None else [(rule, rule.times, "times")]
    if isinstance(rule, RRuleRule) and (count := rrule_times(rule.text, rule.begin).count):
        begun = rule.start if rule.start is not None and _local(rule.start, rule.zone) == rule.begin else None
        counts.append((structs.replace(rule, start=begun, except_on=()), count, "COUNT"))
    return min((at for one in counts if (at := _nth(*one)) is not None), default=None)


def _nth(rule: _Recurrence, number: int, field: str) -> Millis | None:
    """The last of the first `number` instants; None: the rule ends before. Raises BadInput if that takes too long."""
    first, far = rule.start or 0, LAST_INSTANT
    if isinstance(rule, _WallClockRule):
        first = rule.begin - 2 * DAY if isinstance(rule, RRuleRule) and rule.start is None else first
        far = first + _FARTHEST
        if number > _MOST_COUNTED:
            raise BadInput(field, number, f"at most {_MOST_COUNTED:,} with this rule; or until")
    found = rule.upto(first, far, number)
    if len(found) < number and rule.after(far) is not None:
        raise BadInput(field, number, "fewer: the last lies too far ahead to be computed; or until")
    return found[-1] if len(found) == number else None


def _local(at: Millis, zone: str) -> Millis:
    """The local time of an instant, rounded up to a second."""
    return -(-(at + zones.segment(zone, at).offset) // 1000) * 1000


def _next(rule: _Recurrence, at: Millis) -> Millis | None:
    found = rule.step(at if rule.start is None else max(at, rule.start - 1))
    last = rule.until if rule.last is None else rule.last
    return None if found is None or (last is not None and found > last) else found


_after = lru_cache(maxsize=8192)(_next)


def refresh_zones() -> None:
    """Forget all cached zone data, so that a changed time zone database is read anew."""
    for cached in (zones.known_zone, zones.chunk, _after):
        cached.cache_clear()
