"""A browser for tests of the console, without scripts: keeps cookies, reads pages, fills and sends their forms."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

import pytest
from tests.service.calling import Api
from tests.waiting import PATIENCE, wait_until

from bide.insight import bulk, dead_letters
from bide.insight.cached_query import CachedQuery
from bide.service.console import pages, timeline

HOSTILE = "<img src=x onerror=alert(1)>\"'\u202e{{1234567*7654321}}</script>"
_VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})


def be_patient(patch: pytest.MonkeyPatch) -> None:
    """Pages wait for their store until it is a hang, and look at it anew each time, also on a machine that is slow."""
    patch.setattr(pages, "PATIENCE", PATIENCE)
    for module in (bulk, dead_letters, timeline):
        patch.setattr(module, "_PATIENCE", PATIENCE)
    refresh = CachedQuery._refresh

    async def refresh_each_time(self: CachedQuery[Any]) -> None:
        await refresh(self)
        self._again_at = float("-inf")

    patch.setattr(CachedQuery, "_refresh", refresh_each_time)


class Element(NamedTuple):
    """A start tag."""

    tag: str
    attributes: Mapping[str, str | None]


class Form:
    """A form of a page, filled as it came."""

    def __init__(self, action: str) -> None:
        self.action = action
        self.fields: list[tuple[str, str]] = []
        self.boxes: list[tuple[str, str]] = []
        self.buttons: list[dict[str, str]] = []


class Page(HTMLParser):
    """A page as a reader has it."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__()
        self.status = status
        self.headers = headers
        self.body = body
        self.elements: list[Element] = []
        self.links: dict[str, str] = {}
        """Addresses by their words, of several the first."""
        self.rows: list[list[str]] = []
        """Cells of every table row."""
        self.forms: list[Form] = []
        self._form: Form | None = None
        self._open: list[tuple[str, list[str]]] = []
        self._href = ""
        self._texts: list[str] = []
        self._words: list[str] = []
        if headers.get("content-type", "").startswith("text/html"):
            self.feed(body.decode())
            self.close()
        self.text = _plain("".join(self._texts))
        """As it is read."""
        self.words = _plain(" ".join(self._words))
        """The same, with a space wherever an element begins or ends."""

    def __repr__(self) -> str:
        return f"{self.status} {self.text[:300]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append(Element(tag, found))
        if tag == "tr":
            self.rows.append([])
        elif tag == "a":
            self._href = found.get("href") or ""
        elif tag == "form":
            self._form = Form(found.get("action") or "")
            self.forms.append(self._form)
        elif self._form is not None and tag == "input" and found.get("name"):
            pair = (found["name"] or "", found.get("value") or "")
            (self._form.boxes if found.get("type") == "checkbox" else self._form.fields).append(pair)
        elif self._form is not None and tag == "button":
            self._form.buttons.append({"name": found.get("name") or "", "value": found.get("value") or "", "text": ""})
        if tag not in _VOID:
            self._open.append((tag, []))

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID:
            return
        text = ""
        while self._open:
            opened, texts = self._open.pop()
            text = "".join(texts)
            if self._open:
                self._open[-1][1].append(text)
            if opened in ("td", "th") and self.rows:
                self.rows[-1].append(_plain(text))
            if opened == tag:
                break
        else:
            raise AssertionError(f"</{tag}> ends nothing")
        if tag == "a":
            self.links.setdefault(_plain(text), self._href)
        elif tag == "button" and self._form is not None:
            self._form.buttons[-1]["text"] = _plain(text)
        elif tag == "form":
            self._form = None
        if tag in ("p", "div", "li", "td", "th", "h1", "h2", "h3", "dd", "dt", "tr", "option", "label"):
            self._texts.append(" ")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1][0] in ("script", "style"):
            return
        self._texts.append(data)
        self._words.append(data)
        if self._open:
            self._open[-1][1].append(data)

    @property
    def shape(self) -> list[tuple[str, tuple[str, ...]]]:
        """Elements with the names of their attributes: what no text may add to."""
        return [(one.tag, tuple(one.attributes)) for one in self.elements]

    def all(self, tag: str, **attributes: str) -> list[Mapping[str, str | None]]:
        """The attributes of every such element."""
        return [
            one.attributes for one in self.elements
            if one.tag == tag and all(one.attributes.get(name) == text for name, text in attributes.items())
        ]  # fmt: skip

    @property
    def hrefs(self) -> list[str]:
        """Where its links lead."""
        return [one["href"] or "" for one in self.all("a")]

    @property
    def chart(self) -> Any:
        """What a chart is drawn of; None without one."""
        found = [one.attributes["data-chart"] for one in self.elements if one.attributes.get("data-chart")]
        return json.loads(found[0] or "") if found else None

    @property
    def csrf(self) -> str:
        """What its forms must carry."""
        [body] = self.all("body")
        csrf: str = json.loads(body["hx-headers"] or "")["x-csrf-token"]
        return csrf

    def field(self, name: str) -> str:
        """What an input that is seen holds; a hidden one where there is no other."""
        of_name = self.all("input", name=name)
        [found] = [one for one in of_name if one.get("type") != "hidden"] or of_name
        return found.get("value") or ""

    def fields(self) -> dict[str, str]:
        """What the hidden inputs of the form that changes tasks hold."""
        return {one["name"] or "": one.get("value") or "" for one in self.all("input", type="hidden") if one["name"]}

    @property
    def verbs(self) -> list[str]:
        """The buttons that change tasks."""
        return [one["value"] or "" for one in self.all("button", name="verb")]

    @property
    def actions(self) -> list[str]:
        """Where the forms lead."""
        return [one.action for one in self.forms]

    def form(self, button: str) -> Form:
        """The form with a button of this text."""
        found = [one for one in self.forms for each in one.buttons if each["text"] == button]
        assert found, f"no button {button!r} in: {self.words}"
        return found[0]


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


class Browser:
    """Somebody who looks at one instance, and sends the forms of the page that is open."""

    def __init__(self, url: str, *, zone: str = "UTC", language: str = "en") -> None:
        self.host = urlsplit(url).netloc
        self.api = Api(url)
        """Calls the instance as a program does."""
        self.cookies = {"bide_zone": zone}
        self.language = language
        self.page = Page(0, {}, b"")
        self.where = "/"

    def close(self) -> None:
        self.api.close()

    def __call__(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Page:
        """One request, as it is given; the cookies of the answer are kept."""
        cookies = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        sent = {"accept-language": self.language, "accept": "text/html", "cookie": cookies, **(headers or {})}
        reply = self.api(method, path, body=body, headers=sent)
        if "set-cookie" in reply.headers:
            name, _, value = reply.headers["set-cookie"].partition(";")[0].partition("=")
            self.cookies[name] = value
            if not value:
                del self.cookies[name]
        return Page(reply.status, reply.headers, reply.body)

    def get(self, path: str, **query: object) -> Page:
        return self("GET", f"{path}?{urlencode(query)}" if query else path)

    def post(self, path: str, fields: Mapping[str, str] | Sequence[tuple[str, str]], **headers: str) -> Page:
        sent = {"content-type": "application/x-www-form-urlencoded", **headers}
        return self("POST", path, urlencode(fields).encode(), sent)

    def log_in(self, token: str, where: str = "/tasks") -> Page:
        """The page after the login."""
        answer = self.post("/login", {"token": token.removeprefix("Bearer "), "next": where})
        return answer if answer.status != 303 else self.open(answer.headers["location"])

    # --- the page that is open

    @property
    def status(self) -> int:
        return self.page.status

    def open(self, path: str) -> Page:
        return self._shown(path, self.get(path))

    def _shown(self, where: str, page: Page) -> Page:
        """The page, or that to which it leads."""
        self.where = where
        if page.status == 303:
            return self.open(page.headers["location"])
        self.page = page
        return page

    def send(self, fields: Sequence[tuple[str, str]], path: str = "/changes") -> Page:
        """A form of ours."""
        csrf = self.get("/changes").csrf
        return self._shown(path, self.post(path, [("csrf", csrf), *fields]))

    def press(self, button: str, *, ticked: list[str] | None = None, **changed: str) -> Page:
        """Send the form with this button, the named fields filled otherwise, and boxes with these values ticked."""
        form = self.page.form(button)
        fields = [(name, changed.get(name, value)) for name, value in form.fields]
        fields += [pair for pair in form.boxes if pair[1] in (ticked or [])]
        pressed = next(one for one in form.buttons if one["text"] == button)
        if pressed["name"]:
            fields.append((pressed["name"], pressed["value"]))
        return self._shown(form.action, self.post(form.action, fields))


def over(browser: Browser) -> Page:
    """The page of the change that was begun, once it is over."""
    where = browser.where
    assert re.fullmatch(r"/changes/[0-9a-f-]{36}", where), where
    ends = ("Ended", "Stopped by", "Failed")
    wait_until(lambda: any(one in browser.open(where).words for one in ends), "the end of the change")
    return browser.page
