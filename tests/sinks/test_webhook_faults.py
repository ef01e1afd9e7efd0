"""Signatures, and receivers and connections that fail."""

from __future__ import annotations

import asyncio
import base64
import hmac
import os
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from standardwebhooks import Webhook, WebhookVerificationError
from tests.programs import python
from tests.sinks.receiver import Answer, Received, Receiver, closes, hangs, receiving, says, says_bytes
from tests.stores.certificates import certify
from tests.waiting import PATIENCE, pause

from bide import BadInput, Dead, Retry, Task
from bide.core.outcomes import Outcome
from bide.sinks.webhook import WebhookPost, WebhookResult
from bide.sinks.webhook.sending import MOST_READ
from bide.sinks.webhook.signing import Signer
from bide.testing import task_for

PAYLOAD = b'{"number":42,"name":"caf\xc3\xa9"}'


def encoded(size: int) -> str:
    return base64.b64encode(b"k" * size).decode()


def new_secret(size: int = 32) -> str:
    return "whsec_" + base64.b64encode(os.urandom(size)).decode()


OLD, NEW = new_secret(24), new_secret(64)


async def headers_of(secrets: list[str], *, now: float | None = None, payload: bytes = PAYLOAD) -> dict[str, str]:
    """The headers of a request as they arrived."""
    clock = time.time if now is None else (lambda: now)
    async with receiving() as receiver, WebhookPost(allow=[receiver.place], now=clock) as post:
        await post.sink(receiver.url, secrets=secrets).deliver(task_for("order.close", payload, key="42"))
        assert receiver.received[0].body == payload
        return receiver.received[0].headers


@pytest.mark.parametrize("verifier", [OLD, NEW], ids=["old", "new"])
@pytest.mark.parametrize("secrets", [[NEW, OLD], [OLD, NEW]], ids=["new first", "old first"])
async def test_either_secret_verifies_while_one_replaces_the_other(secrets: list[str], verifier: str) -> None:
    headers = await headers_of(secrets)
    assert Webhook(verifier).verify(PAYLOAD, headers) == {"number": 42, "name": "café"}
    assert len(headers["webhook-signature"].split(" ")) == 2


async def test_one_secret_signs_the_body_and_the_id() -> None:
    headers = await headers_of([NEW])
    assert Webhook(NEW).verify(PAYLOAD, headers)
    assert " " not in headers["webhook-signature"]
    for secret, body, given in (
        (OLD, PAYLOAD, headers),
        (NEW, PAYLOAD.replace(b"42", b"43"), headers),
        (NEW, PAYLOAD, {**headers, "webhook-id": "another"}),
    ):
        with pytest.raises(WebhookVerificationError, match="No matching signature"):
            Webhook(secret).verify(body, given)


def verified(secret: str, headers: dict[str, str]) -> bool:
    """As docs/webhooks.md says it."""
    names = ("webhook-id", "webhook-timestamp", "bide-topic", "bide-key", "bide-token", "bide-attempt")
    signed = "\n".join(["bide", *(headers[name] for name in names)])
    made = hmac.digest(base64.b64decode(secret.removeprefix("whsec_")), signed.encode(), "sha256")
    given = headers["bide-signature"].split(" ")
    return any(hmac.compare_digest("v1," + base64.b64encode(made).decode(), one) for one in given)


async def test_what_a_receiver_decides_by_is_signed_as_well() -> None:
    headers = await headers_of([NEW, OLD])
    assert verified(NEW, headers)
    assert verified(OLD, headers)
    assert not verified(new_secret(), headers)
    for name in ("webhook-id", "webhook-timestamp", "bide-topic", "bide-key", "bide-token", "bide-attempt"):
        assert not verified(NEW, {**headers, name: headers[name] + "1"}), name
    moved = {**headers, "bide-topic": "order.close\n42", "bide-key": headers["bide-token"]}
    assert not verified(NEW, moved)
    body = ".".join(headers[name] for name in ("bide-topic", "bide-key", "bide-token", "bide-attempt")).encode()
    with pytest.raises(WebhookVerificationError, match="No matching signature"):
        Webhook(NEW).verify(body, {**headers, "webhook-signature": headers["bide-signature"]})


async def test_without_secrets_there_is_no_signature() -> None:
    headers = await headers_of([])
    assert "webhook-signature" not in headers
    assert {"webhook-id", "webhook-timestamp"} <= set(headers)


def test_the_signature_of_the_standard() -> None:
    """The example that standardwebhooks.com gives."""
    signer = Signer(["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"])
    signature = signer.signature("msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330", b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_secret_without_its_padding_is_the_same() -> None:
    secret = new_secret(25)
    assert secret.endswith("=")
    whole, bare = Signer([secret]), Signer([secret.rstrip("=")])
    assert whole.signature("id", "1", b"") == bare.signature("id", "1", b"")


@pytest.mark.parametrize(
    "secret",
    [
        "correct horse battery staple", encoded(32), "whsec_", "whsec_" + encoded(23), "whsec_" + encoded(65),
        "whsec_not*base64*at*all*really*no", "whpk_" + encoded(32), "whsec_" + encoded(32) + "\n",
        b"whsec_" + encoded(32).encode(), 42, None,
    ],
)  # fmt: skip
def test_what_is_no_secret_is_refused_and_not_shown(secret: object) -> None:
    with pytest.raises(BadInput, match=r"secrets\[1\].*whsec_") as caught:
        Signer([NEW, secret])  # type: ignore[list-item]
    shown = f"{caught.value} {caught.value!r} {caught.value.args} {caught.value.value}"
    assert str(secret).removeprefix("whsec_")[:12] not in shown or not str(secret).removeprefix("whsec_")


def test_secrets_are_a_list() -> None:
    with pytest.raises(BadInput, match="a list of secrets") as caught:
        Signer(NEW)
    assert NEW not in str(caught.value)


def test_no_repr_shows_a_secret() -> None:
    post = WebhookPost()
    sink = post.sink("https://hooks.example.com/a", secrets=[NEW], headers={"authorization": "Bearer hidden"})
    for shown in (repr(Signer([NEW, OLD])), repr(sink), repr(post)):
        assert NEW[6:20] not in shown
        assert "hidden" not in shown


def task(**details: Any) -> Task[Any]:
    return task_for("order.close", {"number": 42}, key="42", **details)


def why(outcome: Outcome | None) -> str:
    assert isinstance(outcome, Retry), outcome
    assert outcome.due is None, "the policy decides"
    assert outcome.why is not None
    return outcome.why


async def trickle(writer: asyncio.StreamWriter, piece: bytes, every: float = 0.01) -> None:
    """For ever, or until the other side has gone."""
    while not writer.is_closing():
        writer.write(piece)
        await writer.drain()
        await pause(every, why="the receiver is slow on purpose")


# --- slow


async def slow_headers(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    await trickle(writer, b"x-a: b\r\n", 0.05)


async def interim(request: Received, writer: asyncio.StreamWriter) -> None:
    await trickle(writer, b"HTTP/1.1 102 Processing\r\n\r\n")


@pytest.mark.parametrize("answer", [hangs, slow_headers, interim])
async def test_no_answer_in_time(receiver: Receiver, post: WebhookPost, answer: Answer) -> None:
    """Nothing at all, headers that never end, interim answers without end."""
    assert await post.sink(receiver.url).deliver(task()) is None, "and now there is a connection"
    receiver.answer = answer
    outcome = await post.sink(receiver.url, total="300ms").deliver(task())
    assert why(outcome) == f"no answer from {receiver.place} within 0.3 s"
    assert post.hosts.allowed(receiver.place) == 10
    assert post.hosts.busy(receiver.place) == 0


@pytest.mark.parametrize(("status", "done"), [(200, True), (500, False)])
async def test_a_body_that_trickles_is_not_waited_for(
    receiver: Receiver, post: WebhookPost, status: int, done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status has come, and decides; what of the body has come is kept to be read."""
    monkeypatch.setattr("bide.sinks.webhook.sending.BODY_PATIENCE", 0.2)

    async def slow_body(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 1000000\r\n\r\nfirst" % status)
        await trickle(writer, b".", 0.02)

    receiver.answer = slow_body
    outcome = await post.sink(receiver.url).deliver(task())
    assert (outcome is None) is done
    if not done:
        assert why(outcome).startswith("500 Internal Server Error: first")
    again = await post.sink(receiver.url).deliver(task())
    assert (again is None) is done
    assert receiver.connections == 2, "a connection in the middle of an answer is not used again"


@pytest.mark.parametrize("status", [200, 500])
async def test_a_body_without_end_is_read_to_a_limit(
    receiver: Receiver, post: WebhookPost, results: list[WebhookResult], status: int
) -> None:
    written = 0

    async def endless(request: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        writer.write(b"HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n" % status)
        while not writer.is_closing():
            writer.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            written += 4096
            await writer.drain()

    receiver.answer = endless
    outcome = await post.sink(receiver.url).deliver(task())
    assert (outcome is None) is (status == 200)
    assert results[0].excerpt == "x" * 500
    assert written < 100 * MOST_READ, "what lies in the buffers of two sockets, and no more"


async def test_a_large_answer_with_an_end(receiver: Receiver, post: WebhookPost) -> None:
    receiver.answer = says(500, b"y" * (MOST_READ // 2))
    sink = post.sink(receiver.url)
    assert why(await sink.deliver(task())).endswith("y" * 500)
    await sink.deliver(task())
    assert receiver.connections == 1


# --- broken


async def resets(request: Received, writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    writer.transport.abort()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (closes, "{} closed the connection without an answer"),
        (resets, "the connection to {} broke (Connection reset by peer)"),
    ],
)
async def test_a_connection_that_ends_without_an_answer(
    receiver: Receiver, post: WebhookPost, answer: Answer, said: str
) -> None:
    receiver.answer = answer
    assert why(await post.sink(receiver.url).deliver(task())) == said.format(receiver.place)
    assert len(receiver.received) == 1, "it is not sent twice for one attempt"


@pytest.mark.parametrize(("status", "done"), [(200, True), (500, False)])
async def test_a_connection_closed_half_way_through_the_answer(
    receiver: Receiver, post: WebhookPost, results: list[WebhookResult], status: int, done: bool
) -> None:
    async def half(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 100\r\n\r\nhalf" % status)
        await writer.drain()
        writer.close()

    receiver.answer = half
    outcome = await post.sink(receiver.url).deliver(task())
    assert (outcome is None) is done
    assert results[0].status == status
    assert results[0].excerpt.startswith(("half", "(ClientPayloadError"))


@pytest.mark.parametrize(
    "answer",
    [b"this is not HTTP\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 abc OK\r\n\r\n",
     b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\x00" * 200],
    ids=lambda answer: repr(answer[:24]),
)  # fmt: skip
async def test_what_is_not_http_is_a_failure(receiver: Receiver, post: WebhookPost, answer: bytes) -> None:
    receiver.answer = says_bytes(answer)
    outcome = await post.sink(receiver.url, total="500ms").deliver(task())
    assert receiver.place in why(outcome)
    assert why(outcome).isprintable()


async def test_two_answers_at_once_do_not_answer_the_next_request(receiver: Receiver, post: WebhookPost) -> None:
    """A second answer behind the first must not pass for that of another task."""
    receiver.answer = says_bytes(
        b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    )
    sink = post.sink(receiver.url)
    for _ in range(3):
        assert "500" in why(await sink.deliver(task()))


# --- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    certify(folder)
    return folder


def server_context(certificates: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    return context


async def test_a_certificate_that_nobody_vouches_for(certificates: Path) -> None:
    async with receiving(tls=server_context(certificates)) as receiver, WebhookPost(allow=["127.0.0.1"]) as post:
        outcome = await post.sink(f"https://{receiver.place}/").deliver(task())
        assert why(outcome).startswith(f"TLS: the certificate of {receiver.place} is not valid (")
        assert "certificate" in why(outcome)
        assert not receiver.received


async def test_an_authority_of_our_own(certificates: Path) -> None:
    trusts = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    async with (
        receiving(tls=server_context(certificates)) as receiver,
        WebhookPost(allow=["127.0.0.1"], tls=trusts) as post,
    ):
        assert await post.sink(f"https://{receiver.place}/").deliver(task()) is None
        assert len(receiver.received) == 1


async def test_a_certificate_for_another_name(certificates: Path) -> None:
    trusts = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    async with receiving(tls=server_context(certificates)) as receiver:
        place = f"localhost:{receiver.port}"
        async with WebhookPost(allow=[place], tls=trusts) as post:
            outcome = await post.sink(f"https://{place}/").deliver(task())
            assert "is not valid" in why(outcome)
            assert not receiver.received


async def test_a_receiver_without_tls(receiver: Receiver) -> None:
    receiver.answer = hangs
    async with WebhookPost(allow=["127.0.0.1"]) as post:
        outcome = await post.sink(f"https://{receiver.place}/", connect="300ms").deliver(task())
    assert why(outcome).startswith((f"no connection to {receiver.place} within 0.3 s", f"TLS with {receiver.place}"))


# --- names and connections


class Names(AbstractResolver):
    """Answers as told; the last answer stays."""

    def __init__(self, *answers: list[str] | Exception | None) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await asyncio.get_running_loop().create_future()
        if isinstance(answer, Exception):
            raise answer
        return [
            ResolveResult(hostname=host, host=address, port=port, family=family, proto=socket.IPPROTO_TCP, flags=0)
            for address in answer or ()
        ]

    async def close(self) -> None:
        """Nothing is held."""


async def test_a_name_that_is_not_known_is_tried_again() -> None:
    names = Names(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    async with WebhookPost(resolver=names) as post:
        outcome = await post.sink("https://gone.example/").deliver(task())
    assert why(outcome) == "gone.example:443: the name could not be looked up (Name or service not known)"


async def test_a_name_server_that_does_not_answer() -> None:
    async with WebhookPost(resolver=Names(None)) as post:
        outcome = await post.sink("https://slow.example/", connect="100ms").deliver(task())
    assert why(outcome) == "no connection to slow.example:443 within 0.1 s"


async def test_the_systems_own_names() -> None:
    async with receiving() as receiver:
        place = f"localhost:{receiver.port}"
        async with WebhookPost(allow=[place]) as post:
            assert await post.sink(f"http://{place}/").deliver(task()) is None
        async with WebhookPost(plain_http=True) as post:
            outcome = await post.sink("http://no-such-host.invalid/").deliver(task())
            assert "could not be looked up" in why(outcome)


async def test_names_that_are_slow_to_look_up_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than the event loop has threads of its own."""
    look_up, released = socket.getaddrinfo, threading.Event()
    begun = threading.Semaphore(0)

    def slowly(host: str, *rest: Any) -> Any:
        if host.endswith(".example"):
            begun.release()
            released.wait(PATIENCE)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return look_up(host, *rest)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    async with receiving() as receiver, WebhookPost(allow=[f"localhost:{receiver.port}"]) as post:
        slow = [post.sink(f"https://slow-{number}.example/", connect="10m", total="10m") for number in range(40)]
        stuck = [asyncio.ensure_future(sink.deliver(task())) for sink in slow]
        for _ in stuck:
            assert await asyncio.to_thread(begun.acquire, timeout=PATIENCE)
        assert await post.sink(f"http://localhost:{receiver.port}/").deliver(task()) is None
        assert not any(one.done() for one in stuck)
        released.set()
        assert all("Temporary failure" in why(outcome) for outcome in await asyncio.gather(*stuck))


LEAVES_A_LOOKUP = """
import asyncio, socket, threading
from bide.sinks.webhook import WebhookPost
from bide.testing import task_for

socket.getaddrinfo = lambda *_: threading.Event().wait()

async def main():
    async with WebhookPost() as post:
        print(await post.sink("https://slow.example/", connect="10ms").deliver(task_for("a", 1)))

asyncio.run(main())
"""


def test_a_name_that_is_slow_to_look_up_does_not_hold_up_the_end_of_the_process() -> None:
    assert "no connection to slow.example:443" in python("-c", LEAVES_A_LOOKUP).stdout


# --- broken off


async def test_a_delivery_that_is_cancelled_ends_its_request(receiver: Receiver, post: WebhookPost) -> None:
    receiver.answer = hangs
    running = asyncio.ensure_future(post.sink(receiver.url).deliver(task()))
    await receiver.came.wait()
    assert post.hosts.busy(receiver.place) == 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert post.hosts.busy(receiver.place) == 0
    assert post.hosts.allowed(receiver.place) == 20, "it says nothing about the host"
    await receiver.gone.wait()


async def test_a_delivery_that_is_cancelled_within_the_answer(receiver: Receiver, post: WebhookPost) -> None:
    begun = asyncio.Event()

    async def slow_body(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 X\r\nContent-Length: 1000000\r\n\r\n")
        await writer.drain()
        begun.set()
        await trickle(writer, b".")

    receiver.answer = slow_body
    running = asyncio.ensure_future(post.sink(receiver.url).deliver(task()))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert post.hosts.busy(receiver.place) == 0
    await receiver.gone.wait()


async def test_a_post_that_is_closed_ends_its_requests(receiver: Receiver) -> None:
    receiver.answer = hangs
    post = WebhookPost(allow=[receiver.place])
    await post.open()
    running = asyncio.ensure_future(post.sink(receiver.url).deliver(task()))
    await receiver.came.wait()
    await post.close()
    outcome = await running
    assert receiver.place in why(outcome)


# --- answers whose status decides, whatever follows it


@pytest.mark.parametrize(
    "rest",
    [
        b"set-cookie: s=" + b"c" * 70_000 + b"\r\ncontent-length: 0\r\n\r\n",
        b"x: y\r\n" * 1_200 + b"content-length: 0\r\n\r\n",
        b"content-length: 5\r\ncontent-length: 7\r\n\r\nhello",
        b"no header at all\r\n\r\n",
    ],
    ids=["a long header", "many headers", "two lengths", "no header"],
)
async def test_the_status_decides_also_where_the_rest_cannot_be_read(
    receiver: Receiver, post: WebhookPost, rest: bytes
) -> None:
    receiver.answer = says_bytes(b"HTTP/1.1 200 OK\r\n" + rest)
    assert await post.sink(receiver.url).deliver(task()) is None
    receiver.answer = says_bytes(b"HTTP/1.1 410 Gone\r\n" + rest)
    assert isinstance(await post.sink(receiver.url).deliver(task()), Dead)


async def test_a_kept_connection_that_is_closed_meanwhile_costs_no_attempt(
    receiver: Receiver, post: WebhookPost
) -> None:
    """A receiver that hangs up instead of answering, once it has answered on the connection."""
    sink, answered = post.sink(receiver.url), set[asyncio.StreamWriter]()

    async def once(request: Received, writer: asyncio.StreamWriter) -> None:
        if writer in answered:
            writer.close()
        else:
            answered.add(writer)
            await says(200)(request, writer)

    receiver.answer = once
    for _ in range(4):
        assert await sink.deliver(task()) is None
    assert receiver.connections == 4
    assert len(receiver.received) == 7, "each but the first was sent twice"
    receiver.answer = closes
    assert "without an answer" in why(await sink.deliver(task()))
    assert len(receiver.received) == 9, "and no more than twice"


async def test_a_redirect_in_another_alphabet_is_told_to_the_observer(
    receiver: Receiver, post: WebhookPost, results: list[WebhookResult]
) -> None:
    receiver.answer = says_bytes(b"HTTP/1.1 302 Found\r\nlocation: /caf\xe9\r\ncontent-length: 0\r\n\r\n")
    assert "/caf" in why(await post.sink(receiver.url).deliver(task()))
    assert [one.status for one in results] == [302]


async def test_a_date_to_wait_for_is_meant_by_the_receivers_clock(receiver: Receiver, post: WebhookPost) -> None:
    told = ("retry-after: Thu, 01 Jan 2026 00:00:30 GMT", "date: Thu, 01 Jan 2026 00:00:00 GMT")
    receiver.answer = says(503, b"", *told)
    outcome = await post.sink(receiver.url).deliver(task())
    assert isinstance(outcome, Retry)
    assert "asked to wait 30 s" in (outcome.why or "")
