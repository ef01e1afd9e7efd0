"""Sentences, numbers and times in the viewer's language and zone, and text from outside within them.

The English sentence is the key of its translations; see `words/`.

Templates escape markup. Text from outside must not move, hide or reorder the text around it either, so `inert` makes
visible what escaping leaves: control characters, marks that reorder text ("Trojan source", CVE-2021-42574), characters
without a width, and halves of surrogate pairs.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime, tzinfo
from importlib.resources import files

from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, Millis, as_datetime, check_instant, duration, instant, rough_text
from bide.core.records import Count
from bide.core.recurrence.zones import zone_info

LANGUAGES = ("en", "zh")
_UNITS = {"en": ("d", "h", "m", "s"), "zh": ("天", "小时", "分", "秒")}
_ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+\-]*(/[A-Za-z0-9_+\-]+){0,2}")
_CHOICE = re.compile(
    r"[ \t]*([A-Za-z]{1,8})(?:-[A-Za-z0-9-]{1,40})?[ \t]*(?:;[ \t]*[qQ]=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)[ \t]*)?"
)
"""A language and its weight, as in RFC 9110 section 12.5.4; anything else is ignored."""
_RULE_TERMS = re.compile(
    "(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day|^every |^at | on (?!day|the)| on day | on the last day of the month|"
    r" of the month| to |minutes?|hours?| and | more$|, |^cron | in |(?<=\d)[dhms](?=\d|$)"
)
_WALL = "2030-01-31 08:00, a time of your zone; 2030-01-31T08:00:00Z, one of another; or a length from now such as 15m"


def translations(language: str) -> Mapping[str, str]:
    """Every sentence in `language`, by its English."""
    if language == "en":
        return {}
    found: dict[str, str] = {}
    for file in (files("bide.service.console") / "words" / language).iterdir():
        found.update(tomllib.loads(file.read_text(encoding="utf-8")))
    return found


_SENTENCES: dict[str, Mapping[str, str]] = {language: translations(language) for language in LANGUAGES}


def language_of(accepted: str | None, chosen: str | None = None) -> str:
    """The chosen language, else the one that the browser prefers (Accept-Language), else English.

    A language counts by its highest weight, whatever the region: "zh-TW;q=0, zh" asks for Chinese.
    """
    if chosen in LANGUAGES:
        return chosen
    wanted: list[tuple[float, int, str]] = []
    for place, part in enumerate((accepted or "")[:500].split(",")):
        found = _CHOICE.fullmatch(part)
        if found and found[1].lower() in LANGUAGES:
            wanted.append((-float(found[2] or 1), place, found[1].lower()))
    best = min(wanted, default=None)
    return "en" if best is None or best[0] == 0 else best[2]


def zone_of(name: str | None) -> tuple[str, tzinfo]:
    """The time zone of this name, as browsers name it; UTC if it is unknown."""
    if name is not None and len(name) <= 64 and _ZONE.fullmatch(name):
        try:
            return name, zone_info(name)
        except BadInput:
            pass
    return "UTC", UTC


class Locale:
    """The language and time zone of one viewer, and the time of the request."""

    def __init__(self, language: str, zone_name: str, zone: tzinfo, now: Millis) -> None:
        self.language = language
        self.zone_name = zone_name
        self.zone = zone
        self.now = now
        self._sentences = _SENTENCES[language]

    def t(self, english: str, **values: object) -> str:
        """Translate a sentence, with its values filled in. One without a translation stays English."""
        text = self._sentences.get(english, english)
        return text.format(**values) if values else text

    def rule_words(self, words: str) -> str:
        """The words of a rule of recurring tasks, translated one by one."""
        units = dict(zip(_UNITS["en"], _UNITS[self.language], strict=True))
        return _RULE_TERMS.sub(lambda term: units.get(term[0]) or self.t(term[0]), words)

    # --- numbers

    def number(self, count: float | Count | None) -> str:
        """12,345; "10,000+" if counting stopped there; an empty string for an unknown number."""
        if count is None:
            return ""
        if isinstance(count, Count):
            return f"{count.number:,}{'' if count.exact else '+'}"
        if isinstance(count, int):
            return f"{count:,}"
        return f"{count:,.0f}" if abs(count) >= 100 else f"{count:.3g}"

    def size(self, count: int) -> str:
        """A number of bytes: "10 B", "2.0 KiB"."""
        if count < 1024:
            return f"{count} B"
        return f"{count / 1024:,.1f} KiB" if count < 1024 * 1024 else f"{count / 1048576:,.1f} MiB"

    # --- times

    def length(self, millis: Millis | None) -> str:
        """The two largest units of a duration: "14m 3s", "2d 4h", "4.2s", "12 ms"; an empty string for none."""
        if millis is None:
            return ""
        sign, millis = ("−" if millis < 0 else ""), abs(millis)
        space = " " if self.language == "en" else ""
        if millis < 1_000:
            return f"{sign}{millis} {'ms' if self.language == 'en' else '毫秒'}"
        return f"{sign}{rough_text(millis, _UNITS[self.language], space)}"

    def relative(self, at: Millis) -> str:
        """ "in 14m 3s", "3.2s ago", "now"; "never" for a recurring task that is paused."""
        if at == LAST_INSTANT:
            return self.t("never")
        if abs(at - self.now) < 50:
            return self.t("now")
        if at > self.now:
            return self.t("in {length}", length=self.length(at - self.now))
        return self.t("{length} ago", length=self.length(self.now - at))

    def moment(self, at: Millis, *, millis: bool = False) -> str:
        """The date and time in the viewer's zone: 2030-01-31 08:00:00, with milliseconds where they matter.

        Of the last instant "never", as `relative`.
        """
        if at == LAST_INSTANT:
            return self.t("never")
        text = self._local(at).strftime("%Y-%m-%d %H:%M:%S")
        return f"{text}.{at % 1000:03d}" if millis else text

    def clock(self, at: Millis, step: Millis = 1_000) -> str:
        """A short time: with the day unless it is today; the day alone if steps are days or longer."""
        local, today = self._local(at), self._local(self.now)
        day = "" if local.date() == today.date() else local.strftime("%m-%d ")
        if step >= 86_400_000:
            return local.strftime("%m-%d")
        return day + local.strftime("%H:%M:%S" if step < 60_000 else "%H:%M")

    def wall(self, at: Millis) -> str:
        """The date and time in the viewer's zone, with the offset from UTC."""
        return self._local(at).strftime("%Y-%m-%d %H:%M:%S %z")

    def read_time(self, text: str, field: str) -> Millis:
        """Read an instant as typed: a local time, one with an offset, or a duration from now. Raises BadInput.

        A local time that occurs twice means the first; one that is skipped, the first instant after the gap.
        """
        text, at, moment = text.strip(), self.now, None
        try:
            if re.match(r"[0-9]{4}-", text) is None:
                at += duration(text.removeprefix("+"), field=field, negative=True)
            elif text.isprintable():  # fromisoformat reads on past a NUL
                moment = datetime.fromisoformat(text)
            else:
                raise ValueError
        except ValueError:
            raise BadInput(field, text, _WALL) from None
        if moment is not None:
            return instant(moment, field=field, zone=self.zone_name)
        return check_instant(at, field=field, value=text)

    def _local(self, at: Millis) -> datetime:
        """In the viewer's zone; in UTC if that would be past the last year."""
        moment = as_datetime(at)
        try:
            return moment.astimezone(self.zone)
        except OverflowError:
            return moment


# --- text from outside

_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5"
    "\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Every control and format character, every line separator, and whatever else is invisible in Unicode; but not U+FE0F,
which is part of many emoji."""


def inert(text: str, limit: int | None = None) -> str:
    """`text` with invisible characters made visible, cut at `limit` characters with an ellipsis."""
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    return _ODD.sub(_made_visible, text)


def inert_line(text: str, limit: int | None = None) -> str:
    """The same on one line: line breaks and tabs are made visible too."""
    return inert(text, limit).replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥")


def isolated(text: str, limit: int = 200) -> str:
    """`text` on one line for use within a sentence, whose direction it cannot change. Do not make it inert again."""
    return f"\u2068{inert_line(text, limit)}\u2069"


def _made_visible(match: re.Match[str]) -> str:
    point = ord(match[0])
    if point < 0x20 or point == 0x7F:
        return chr(0x2400 + min(point, 0x21))  # the control pictures of Unicode
    return f"[{unicodedata.name(match[0], f'U+{point:04X}')}]"
