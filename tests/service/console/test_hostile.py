"""Whatever stands in a topic, key, group, error, payload, header or worker's name: pages have the same elements.

Each page is read twice, of a store whose texts are harmless and of one whose texts are not, and must be made of the
same elements with the same attributes: also those of changes, from the preview to the end and where one is refused.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Mapping
from html import unescape
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape
from tests.service.calling import Running, running
from tests.service.console.browsing import Browser, Page, over

from bide import Bide, Every
from bide.core.events import Event, EventKind
from bide.core.records import OutcomeKind, Record, Settlement
from bide.engine.pauses import Pauses
from bide.service.console.i18n import inert, inert_line, isolated
from bide.service.console.rendering import address, recurring_address, task_address, topic_address
from bide.testing import ManualClock

UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
ANY = st.text(st.characters(codec=None), max_size=60)


def test_every_character_that_cannot_be_seen_is_shown() -> None:
    for point in range(sys.maxunicode + 1):
        letter = chr(point)
        if unicodedata.category(letter) in UNSEEN and letter not in "\n\t":
            assert inert(letter) != letter, f"U+{point:04X}"
    for letter in "\u034f\u115f\u17b4\u2800\u3164\uffa0\ufe00\U000e0100\U000e01ef":
        assert inert(letter) != letter, f"U+{ord(letter):04X}"


def test_what_can_be_seen_stays() -> None:
    for text in ("order-42", "Bestellung Größe", "订单 42", "ملاحظة", "❤\ufe0f", "<b>&'\"", "a\tb\nc"):
        assert inert(text) == text


@given(ANY, st.integers(1, 30))
def test_what_is_shown_is_harmless_and_stays_so(text: str, limit: int) -> None:
    shown = inert(text)
    assert not [one for one in shown if unicodedata.category(one) in UNSEEN and one not in "\n\t"]
    assert inert(shown) == shown
    shown.encode()

    line = inert_line(text)
    assert len(line.splitlines()) <= 1
    assert "\t" not in line

    assert inert(text, limit) == inert(text if len(text) <= limit else text[: limit - 1] + "…")
    assert ("…" in inert(text, limit)) or len(text) <= limit

    sentence = isolated(text)
    assert sentence[0] + sentence[-1] == "\u2068\u2069", "it keeps its direction"
    assert sentence[1:-1] == inert_line(text, 200)

    markup = str(escape(shown))
    assert not set(markup) & set("<>\"'")
    assert unescape(markup) == shown


START = 1_900_000_020_000
MARKUP = "</td></script><script>alert(1)</script><img src=x onerror=alert(1)>"
HOSTILE = [
    MARKUP,
    "\"'` onmouseover=alert(1) x=\"'",
    "{{1234*5678}}{% raw %}${1234*5678}<%= 1234*5678 %>",
    "\u202e\u2066\u200b\u200f\ufeff\u2069 gnp.exe",
    "javascript:alert(1)",
    "&lt;b&gt;&amp;#60;&quot;",
    "--><!--",
    "'%00\\..\\/;--",
    "\U000e0041\ufff9\u0301\u0301\u0301\u0301",
]
"""What a name may be, as far as stores are concerned."""
WORSE = ["\x00\x1b[31mred\x07\r\n\t", "<b>" * 20_000, "\u2028\u2029\x85"]
"""What only an error or a payload may be."""


class Texts(NamedTuple):
    """What is put into a store."""

    name: str
    free: str


HARMLESS = Texts("order", "it went wrong")


def look(texts: Texts) -> Mapping[str, Page]:
    """Every page that shows such texts, by what it is of."""
    clock = ManualClock(START)
    name = texts.name
    with running("memory:", keep_done="1h", clock=clock) as one:
        one.run(_fill(one, texts, clock))
        browser = Browser(one.url)
        paths = {
            "tasks": "/tasks",
            "searched": address("/tasks", topic=name, group=name),
            "not found": address("/tasks", topic=name, key=name, state="done"),
            "left out": address("/tasks", key="dead" + name[:100], state="waiting"),
            "refused": address("/tasks", topic=name, wake_from="x" + texts.free[:100]),
            "waiting": task_address(name, "a" + name[:100]),
            "part": task_address(name, "a" + name[:100], "live"),
            "dead": task_address(name, "dead" + name[:100]),
            "gone": task_address(name, "gone" + name[:100]),
            "overview": "/",
            "topics": "/topics",
            "topic": topic_address(name),
            "dead letters": "/dead",
            "timeline": "/timeline",
            "recurring": "/recurring",
            "recurring of a topic": address("/recurring", topic=name),
            "a recurring task": recurring_address(name, "recurs" + name[:100]),
            "no recurring task": recurring_address(name, "gone" + name[:100]),
        }
        pages = {what: browser.get(path) for what, path in paths.items()}
        dead = next(where for where in pages["dead letters"].hrefs if "error=" in where)
        pages["dead letters of a kind"] = browser.open(dead)
        pages["all of a kind"] = browser.press("Redrive all of the group")
        browser.open(paths["a recurring task"])
        pages["a recurring task to remove"] = browser.press("Remove")
        seen = pages["waiting"].fields() | {"verb": "cancel"}
        pages["preview"] = browser.send([("verb", "shift"), ("scope", "matching"), ("group", name), ("by", "5h")])
        browser.press("Shift: 1 task")
        pages |= {"change": over(browser), "change, part": browser.get(f"{browser.where}/live")}
        pages["changed in the meantime"] = browser.post("/changes", seen)
        browser.close()
    return pages


async def _fill(one: Running, texts: Texts, clock: ManualClock) -> None:
    app, name = one.app, texts.name
    printable = "".join(letter for letter in texts.free[:200] if letter.isprintable())
    header = "".join(letter for letter in name if letter.isprintable()) or "x"
    free = texts.free.encode(errors="replace")
    headers = {"h" + header: "v" + printable}
    await app.schedule(name, free, key="a" + name[:100], group=name, delay="1h", headers=headers)
    await app.schedule(name, free, key="dead" + name[:100], group=name, delay="0s")
    clock.advance(5_000)
    leased = await app.store.lease({name: 1}, now=clock.now(), until=clock.now() + 60_000, holder=texts.free[:100])
    [record] = leased.tasks
    failed = texts.free[:2_000]
    dead = Settlement(name, record.key, record.token, OutcomeKind.DEAD, None, clock.now() + 60_000_000, failed)
    assert await app.store.settle([dead], now=clock.now()) == [True]
    _tell(app, record, texts, clock)
    await app.recorder.flush()
    await Pauses(app.store, clock).pause(name, who=texts.free[:100])
    workers = app.store.features.workers
    assert workers is not None
    await workers.announce(f"worker of {name}", [name], clock.now() + 60_000, now=clock.now())
    await app.schedule(name, free, key="leased" + name[:100], delay="0s")
    await app.recurring.add(name, Every("1h"), free, key="recurs" + name[:100], headers=headers)
    now = clock.now()
    for kind in (EventKind.DROPPED, EventKind.DEAD):
        app.recorder.note(Event(at=now, topic=name, key="recurs" + name[:100], id="x", kind=kind, what=texts.free))
    assert (await app.store.lease({name: 1}, now=now, until=now + 60_000, holder=texts.free[:100])).tasks


def _tell(app: Bide, record: Record, texts: Texts, clock: ManualClock) -> None:
    """What the log says of it."""
    who, now = texts.free[:100], clock.now()
    for kind, what in ((EventKind.RETRY, texts.free), (EventKind.CHANGE, f"{texts.free}: {texts.free}")):
        event = Event(
            at=now, topic=record.topic, key=record.key, id=record.id, kind=kind, who=who, what=what, was=now,
            wake_at=now,
        )  # fmt: skip
        app.recorder.note(event)


@pytest.fixture(scope="module")
def harmless() -> Mapping[str, Page]:
    return look(HARMLESS)


MAY_VARY = frozenset({"timeline", "dead letters"})
"""Pages whose rows are of what the texts have in common, or of the time: of them the kinds of elements are compared."""


@pytest.mark.parametrize("texts", [*[Texts(one, one) for one in HOSTILE], *[Texts(MARKUP, one) for one in WORSE]])
def test_no_text_adds_an_element_or_an_attribute(harmless: Mapping[str, Page], texts: Texts) -> None:
    for what, page in look(texts).items():
        expected = harmless[what]
        assert page.status == expected.status, (what, page)
        if what in MAY_VARY:
            assert set(page.shape) - {("br", ())} <= set(expected.shape), what
        else:
            assert page.shape == expected.shape, what
        for tag, attributes in page.elements:
            for where in ("href", "src", "action", "data-live"):
                text = attributes.get(where)
                assert text is None or text.startswith(("/", "#")), (what, tag, text)
                assert text is None or not text.startswith("//"), (what, tag, text)
        if expected.status == 200 and what != "timeline":
            assert not set(page.text) & set("\u202e\u200b\u200f\ufeff\x00\x1b\x07\u2028\x85"), what
        assert str(1234 * 5678) not in page.text
