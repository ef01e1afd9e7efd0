"""One request as the calls see it: read from ASGI with a limit in bytes and in time, the path still as it was sent; the
address that it came from; and whether a page of another site made a browser send it (CSRF).

The last is told by what browsers say of a request and pages cannot change, in the order of Go's
`http.CrossOriginProtection`, which is the outcome of F. Valsorda's research ("Cross-Site Request Forgery", 2025):
Sec-Fetch-Site where there is one, else Origin against Host, else it is no browser. What neither shows is DNS rebinding:
there the attacker's name leads to this address, so to the browser it is the same site. What gives that away is the name
itself, in Host.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, NotRequired, Required, TypeAlias, TypedDict, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from bide.core.errors import BadInput
from bide.core.names import check_name, check_topic
from bide.service.authz import AccessRefused, Caller
from bide.service.replies import Problem, bad_body, bad_input, too_large

_OWN = frozenset({"same-origin", "none"})
"""`none` is the user: an address typed in, a bookmark. `same-site` is another port or subdomain, which is another's."""
_PROXIED = frozenset({b"forwarded", b"via", b"x-real-ip"})
Networks: TypeAlias = Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]
_PORTS = {"http": "80", "https": "443"}


class Foreign(AccessRefused):
    """A page of another site is behind this request, or a name that is not this service's."""

    status = 403
    title = "Forbidden"
    code = None


def refuse_foreign_page(*, host: str | None, origin: str | None, site: str | None) -> None:
    """Raises Foreign where a page of another origin sent this. The arguments are Host, Origin and Sec-Fetch-Site.

    Call it for whatever changes something and is known by a cookie, or by nothing at all. Who sends a bearer token
    needs no such check: no page of another's has it.
    """
    if site is not None:
        if site not in _OWN:
            raise Foreign("a page of another site sent this; open the console itself, or send a token")
        return
    if origin is not None:
        place = _place(origin)
        if place is None or host is None or place != _place(f"//{host}", origin):
            raise Foreign("a page of another origin sent this; open the console itself, or send a token")


def refuse_foreign_name(host: str | None) -> None:
    """Raises Foreign unless Host is this machine by an address of loopback or as localhost.

    For callers without a token of a service on loopback. A request without Host comes from no browser.
    """
    if host is not None and not is_loopback_name(host_name(host)):
        raise Foreign("without a token this service is called by 127.0.0.1, [::1] or localhost only, not by that name")


def refuse_proxied(headers: Iterable[bytes]) -> None:
    """Raises Foreign where the names of the headers tell that a proxy has passed this on.

    For callers without a token of a service on loopback: who calls the proxy may be anybody, whatever Host says.
    """
    if any(name in _PROXIED or name.startswith(b"x-forwarded-") for name in headers):
        raise Foreign("without a token this service is called directly, not through a proxy (bide token add)")


def networks_of(proxies: Iterable[str]) -> Networks:
    """Addresses and networks in text. Raises BadInput."""
    found = []
    for text in proxies:
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise BadInput("proxies", text, f"an address, or a network such as 10.1.0.0/16 ({error})") from None
    return found


def peer_of(client: str, forwarded: str | None, proxies: Networks) -> str:
    """The address that called: the client's, or the last in X-Forwarded-For that is no proxy's of ours, which is the
    last one that somebody whom we trust has written. What is no address is nobody's."""
    named = [] if forwarded is None else forwarded.split(",")
    while named and proxies and _is_of(client, proxies):
        try:
            client = str(ipaddress.ip_address(named.pop().strip()))
        except ValueError:
            break
    return client


def _is_of(address: str, networks: Networks) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(found in network for network in networks)


def is_loopback_name(name: str) -> bool:
    """Whether `name`, as a browser sends it, can only be this machine; `*.localhost` is one by RFC 6761."""
    if name == "127.0.0.1":  # almost always, and reading an address takes long
        return True
    name = name.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """Host without its port."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isascii() and port.isdigit() and (":" not in name or name.endswith("]")) else host


def _place(url: str, like: str = "") -> str | None:
    """Name and port of a URL, without what goes without saying; None for what is none, such as `null`."""
    scheme, found, rest = url.partition("//")
    if not found or not rest or any(letter in rest for letter in "/?#@\\ "):
        return None
    scheme = (scheme or like.partition("//")[0]).removesuffix(":").lower()
    rest = rest.lower()
    usual = _PORTS.get(scheme)
    return rest.removesuffix(f":{usual}") if usual else rest


BODY_LIMIT = 16 * 2**20
"""Bytes that a request may have."""
BODY_PATIENCE = 30.0
"""Seconds that a request's body may take."""
OPEN_LIMIT = 16_384
"""Bytes that a request may have of which nobody knows who sent it."""
Ask = TypeVar("Ask")
T = TypeVar("T")
_HALF_ENCODED = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_NOBODY = Caller("nobody", verbs=frozenset(), topics=())


class Scope(TypedDict):
    """A request as ASGI begins it, as far as it is read here."""

    type: str
    method: str
    path: str
    raw_path: NotRequired[bytes | None]
    query_string: bytes
    headers: list[tuple[bytes, bytes]]
    client: NotRequired[tuple[str, int] | None]


class Message(TypedDict, total=False):
    """An event of ASGI, received or sent."""

    type: Required[str]
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    more_body: bool


Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Gone(Exception):
    """The client has gone: nobody is there to be answered."""


class Request:
    """A request. `caller` is who sent it, once that is known."""

    __slots__ = (
        "_query", "_receive", "_scope", "body", "caller", "headers", "limits", "method", "path", "proxies", "segments",
        "still",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self.method: str = scope["method"]
        self.path: bytes = (scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0]
        self._query: bytes = scope["query_string"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self._scope = scope
        self.proxies: Networks = ()
        """Whose word on the address of a caller counts."""
        self.limits = (BODY_LIMIT, BODY_PATIENCE)
        """Bytes and seconds that its body may take."""
        self.body = b""
        self.caller = _NOBODY
        self.segments: tuple[str, ...] = ()
        self.still: Callable[[], Awaitable[float]]
        """Raises when the caller may call no longer; else the seconds after which to ask again. Set with `caller`."""

    @property
    def raw_query(self) -> bytes:
        """What follows the question mark, as it was sent."""
        return self._query

    def header(self, name: bytes) -> str | None:
        """The value of a header. Raises Problem where it is not text."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def peer(self) -> str:
        """The address that it came from."""
        client = self._scope.get("client")
        return peer_of(client[0] if client else "local", self.header(b"x-forwarded-for"), self.proxies)

    def check_host(self) -> None:
        """Raises Problem where Host comes twice: which of them counts is not to be guessed (RFC 9112, 3.2)."""
        sent = self._scope["headers"]
        if len(sent) != len(self.headers) and sum(name == b"host" for name, _ in sent) > 1:
            raise Problem(400, "bad-host", "Host comes twice", "send one Host header", field="host")

    async def read(self, most: int | None = None) -> None:
        """Take in the body; at most `most` bytes where nobody is known yet.

        Raises Problem for one that is too large or comes too slowly; Gone.
        """
        limit, patience = self.limits
        limit = limit if most is None else min(limit, most)
        length = self.headers.get(b"content-length")
        if length is not None and length.isdigit() and (len(length) > 19 or int(length) > limit):
            raise too_large(limit)
        try:
            async with asyncio.timeout(patience):
                await self._read(limit)
        except TimeoutError:
            raise Problem(
                408, "too-slow", "The body came too slowly", f"the body was not complete after {patience:g} s",
                headers={"connection": "close"},
            ) from None  # fmt: skip

    async def _read(self, limit: int) -> None:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise Gone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise too_large(limit)
            if not message.get("more_body"):
                self.body = part if not parts else b"".join([*parts, part])
                return
            parts.append(part)

    async def gone(self) -> None:
        """Returns when the client has gone."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def attended(self, work: Coroutine[Any, Any, T], undo: Callable[[T], object] = lambda _: None) -> T:
        """What `work` returns, however long it takes. The one place that looks after a caller who waits.

        Raises Gone as the client goes, and what `still` raises as they may call no longer: that is asked by the clock,
        and once more before the result is theirs. Then `work` is cancelled; what it has returned is undone.
        """
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(self.gone())
        theirs = False
        try:
            while not working.done():
                lasts = await self.still()
                await asyncio.wait([working, leaving], timeout=max(0.0, lasts), return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    raise Gone
            await self.still()
            theirs = True
            return working.result()
        finally:
            for task in (working, leaving):
                task.cancel()
            [result, _] = await asyncio.gather(working, leaving, return_exceptions=True)
            if not theirs and not isinstance(result, BaseException):
                undo(result)

    def decoded(self, decoder: msgspec.json.Decoder[Ask], accepted: str) -> Ask:
        """The body as what the call takes. Raises Problem that names the field."""
        kind = self.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise Problem(
                415, "not-json", "Only JSON is taken",
                f"content-type: {kind.decode('latin-1') or 'none'}; send application/json",
                field="content-type", accepted="application/json",
            )  # fmt: skip
        try:
            if not self.body.isascii():
                self.body.decode()  # the decoder passes over a payload without looking into its text
            return decoder.decode(self.body)
        except (ValueError, RecursionError) as error:
            raise bad_body(error, accepted, decoder.type, self.body) from None

    def query(self, known: tuple[str, ...]) -> dict[str, str]:
        """The parameters after the question mark, each at most once. Raises Problem for one that is not known."""
        try:
            _check_percents(self._query)
            pairs = parse_qsl(
                self._query.decode("ascii"), keep_blank_values=True, strict_parsing=bool(self._query), errors="strict"
            )
        except ValueError:
            raise bad_input(
                BadInput("query", self._query.decode("latin-1"), "name=value&..., percent-encoded")
            ) from None
        found: dict[str, str] = {}
        for name, value in pairs:
            if name not in known:
                raise bad_input(
                    BadInput("query", name, f"parameters named {', '.join(known)}" if known else "no query")
                )
            if name in found:
                raise bad_input(BadInput(name, value, "one value"))
            found[name] = value
        return found

    @property
    def ref(self) -> tuple[str, str]:
        """The topic and the key in the path. Raises Problem."""
        topic, key = self.segments
        try:
            return check_topic(topic), check_name("key", key)
        except BadInput as error:
            raise bad_input(error) from None


def segment(raw: bytes, field: str) -> str:
    """One part of a path, percent-decoded. Raises Problem."""
    try:
        _check_percents(raw)
        return unquote_to_bytes(raw).decode()
    except ValueError:
        raise bad_input(BadInput(field, raw.decode("latin-1"), "percent-encoded UTF-8")) from None


def _check_percents(raw: bytes) -> None:
    """Decoding would leave them as they are, and so two paths would mean one key. Raises ValueError."""
    if _HALF_ENCODED.search(raw):
        raise ValueError("a % that begins no encoded byte")
