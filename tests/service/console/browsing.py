"""A browser for tests of the console, without scripts: keeps cookies, reads pages, sends their forms."""

from __future__ import annotations

import http.client
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit

PATIENCE = 20.0
"""Seconds that pages wait for their store in tests: longer than a machine stands still, which would be taken for a
silent store."""
_VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})


class Element(NamedTuple):
    """A start tag."""

    tag: str
    attributes: Mapping[str, str | None]


class Page(HTMLParser):
    """A page as a reader has it."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__()
        self.status = status
        self.headers = headers
        self.body = body
        self.elements: list[Element] = []
        self.links: dict[str, str] = {}
        """Addresses by their words."""
        self.rows: list[list[str]] = []
        """Cells of every table row."""
        self._open: list[tuple[str, list[str]]] = []
        self._href = ""
        self._texts: list[str] = []
        if headers.get("content-type", "").startswith("text/html"):
            self.feed(body.decode())
            self.close()
        self.text = _plain("".join(self._texts))

    def __repr__(self) -> str:
        return f"{self.status} {self.text[:300]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag == "a":
            self._href = dict(attrs).get("href") or ""
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
            self.links[_plain(text)] = self._href
        if tag in ("p", "div", "li", "td", "th", "h1", "h2", "h3", "dd", "dt", "tr", "option", "label"):
            self._texts.append(" ")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1][0] in ("script", "style"):
            return
        self._texts.append(data)
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


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


class Browser:
    """Somebody who looks at one instance."""

    def __init__(self, url: str, *, zone: str = "UTC", language: str = "en") -> None:
        self.host = urlsplit(url).netloc
        self.cookies = {"bide_zone": zone}
        self.language = language
        self._connection = http.client.HTTPConnection(self.host, timeout=30)

    def close(self) -> None:
        self._connection.close()

    def __call__(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Page:
        """One request, as it is given; the cookies of the answer are kept."""
        cookies = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        sent = {"accept-language": self.language, "accept": "text/html", "cookie": cookies, **(headers or {})}
        try:
            self._connection.request(method, path, body, sent)
            got = self._connection.getresponse()
            text = got.read()
        except BaseException:
            self._connection.close()
            raise
        found = {name.lower(): value for name, value in got.getheaders()}
        if "set-cookie" in found:
            name, _, value = found["set-cookie"].partition(";")[0].partition("=")
            self.cookies[name] = value
            if not value:
                del self.cookies[name]
        return Page(got.status, found, text)

    def get(self, path: str, **query: object) -> Page:
        return self("GET", f"{path}?{urlencode(query)}" if query else path)

    def post(self, path: str, fields: Mapping[str, str] | Sequence[tuple[str, str]], **headers: str) -> Page:
        sent = {"content-type": "application/x-www-form-urlencoded", **headers}
        return self("POST", path, urlencode(fields).encode(), sent)

    def log_in(self, token: str, where: str = "/tasks") -> Page:
        """The page after the login."""
        answer = self.post("/login", {"token": token.removeprefix("Bearer "), "next": where})
        return answer if answer.status != 303 else self.get(answer.headers["location"])
