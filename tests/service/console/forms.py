"""Pages as they are sent, with their forms: filled as they came, and sent as a browser does."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from urllib.parse import urlencode

from tests.service.calling import Api, Reply

HOSTILE = "<img src=x onerror=alert(1)>\"'\u202e{{7*7}}</script>"


class Form:
    """A form of a page, filled as it came."""

    def __init__(self, attributes: dict[str, str | None]) -> None:
        self.action = attributes.get("action") or ""
        self.fields: list[tuple[str, str]] = []
        self.boxes: list[tuple[str, str]] = []
        self.buttons: list[dict[str, str]] = []


class Parsed(HTMLParser):
    """What a page is made of, what it says, and the forms in it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.forms: list[Form] = []
        self.links: list[str] = []
        self.values: dict[str, str] = {}
        """Of inputs, by name."""
        self._inside = False
        self._button: dict[str, str] | None = None
        self._texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.attributes |= found.keys()
        if found.get("href"):
            self.links.append(found["href"] or "")
        if tag == "input" and found.get("name"):
            self.values[found["name"] or ""] = found.get("value") or ""
        if tag == "form":
            self.forms.append(Form(found))
            self._inside = True
        elif self._inside and tag == "input" and found.get("name"):
            pair = (found["name"] or "", found.get("value") or "")
            (self.forms[-1].boxes if found.get("type") == "checkbox" else self.forms[-1].fields).append(pair)
        elif self._inside and tag == "button":
            self._button = {"name": found.get("name") or "", "value": found.get("value") or "", "text": ""}
            self.forms[-1].buttons.append(self._button)

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._inside = False
        elif tag == "button":
            self._button = None

    def handle_data(self, data: str) -> None:
        self._texts.append(data)
        if self._button is not None:
            self._button["text"] += data.strip()

    @property
    def text(self) -> str:
        return " ".join(" ".join(self._texts).split())

    @property
    def actions(self) -> list[str]:
        """Where the forms lead."""
        return [one.action for one in self.forms]

    def form(self, button: str) -> Form:
        """The form with a button of this text."""
        found = [one for one in self.forms for each in one.buttons if each["text"] == button]
        assert found, f"no button {button!r} in: {self.text}"
        return found[0]


class FormBrowser:
    """Keeps the cookie, knows the page that is open, and sends its forms."""

    def __init__(self, api: Api, language: str = "en") -> None:
        self._api = api
        self._headers = {"accept-language": language}
        self.status = 0
        self.where = "/"
        self.page = Parsed("")
        self.csrf = ""

    def log_in(self, token: str) -> None:
        self._sent(self._post("/login", [("token", token)]))

    def open(self, path: str) -> Parsed:
        self.where = path
        return self._sent(self._api("GET", path, headers=self._headers))

    def send(self, fields: list[tuple[str, str]], path: str = "/changes") -> Parsed:
        """A form of ours."""
        if not self.csrf:
            self.open("/changes")
        return self._sent(self._post(path, [("csrf", self.csrf), *fields]))

    def press(self, button: str, *, ticked: list[str] | None = None, **changed: str) -> Parsed:
        """Send the form with this button, the named fields filled otherwise, and boxes with these values ticked."""
        form = self.page.form(button)
        fields = [(name, changed.get(name, value)) for name, value in form.fields]
        fields += [pair for pair in form.boxes if pair[1] in (ticked or [])]
        pressed = next(one for one in form.buttons if one["text"] == button)
        if pressed["name"]:
            fields.append((pressed["name"], pressed["value"]))
        return self._sent(self._post(form.action, fields))

    def _post(self, path: str, fields: list[tuple[str, str]]) -> Reply:
        self.where = path
        headers = {**self._headers, "content-type": "application/x-www-form-urlencoded"}
        return self._api("POST", path, body=urlencode(fields).encode(), headers=headers)

    def _sent(self, reply: Reply) -> Parsed:
        cookie = reply.headers.get("set-cookie", "")
        if cookie.startswith("bide_session="):
            self._headers["cookie"] = cookie.partition(";")[0]
        if reply.status == 303:
            return self.open(reply.headers["location"])
        self.status = reply.status
        html = reply.body.decode()
        found = re.search(r'"x-csrf-token": "([^"]*)"', html)
        if found is not None and found[1]:
            self.csrf = found[1]
        self.page = Parsed(html)
        return self.page


def over(browser: FormBrowser) -> Parsed:
    """The page of the change that was begun, once it is over."""
    where = browser.where
    assert re.fullmatch(r"/changes/[0-9a-f-]{36}", where), where
    for _ in range(2_000):
        if any(one in browser.page.text for one in ("Ended", "Stopped by", "Failed")):
            return browser.page
        browser.open(where)
    raise AssertionError(browser.page.text)
