"""Signatures, checked by the library that receivers use."""

from __future__ import annotations

import base64
import hmac
import os
import time

import pytest
from standardwebhooks import Webhook, WebhookVerificationError
from tests.sinks.receiver import receiving

from bide import BadInput
from bide.sinks.webhook import WebhookPost
from bide.sinks.webhook.signing import Signer
from bide.testing import task_for

PAYLOAD = b'{"number":42,"name":"caf\xc3\xa9"}'


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


async def test_one_secret() -> None:
    headers = await headers_of([NEW])
    assert Webhook(NEW).verify(PAYLOAD, headers)
    assert " " not in headers["webhook-signature"]
    with pytest.raises(WebhookVerificationError, match="No matching signature"):
        Webhook(OLD).verify(PAYLOAD, headers)


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


async def test_an_altered_body_or_id_does_not_verify() -> None:
    headers = await headers_of([NEW])
    with pytest.raises(WebhookVerificationError, match="No matching signature"):
        Webhook(NEW).verify(PAYLOAD.replace(b"42", b"43"), headers)
    with pytest.raises(WebhookVerificationError, match="No matching signature"):
        Webhook(NEW).verify(PAYLOAD, {**headers, "webhook-id": "another"})


async def test_a_request_sent_again_much_later_does_not_verify() -> None:
    headers = await headers_of([NEW], now=time.time() - 600)
    with pytest.raises(WebhookVerificationError, match="too old"):
        Webhook(NEW).verify(PAYLOAD, headers)
    fresh = {**headers, "webhook-timestamp": str(int(time.time()))}
    with pytest.raises(WebhookVerificationError, match="No matching signature"):
        Webhook(NEW).verify(PAYLOAD, fresh)


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
        "correct horse battery staple",
        base64.b64encode(b"k" * 32).decode(),
        "whsec_",
        "whsec_" + base64.b64encode(b"k" * 23).decode(),
        "whsec_" + base64.b64encode(b"k" * 65).decode(),
        "whsec_not*base64*at*all*really*no",
        "whpk_" + base64.b64encode(b"k" * 32).decode(),
        "whsec_" + base64.b64encode(b"k" * 32).decode() + "\n",
        b"whsec_" + base64.b64encode(b"k" * 32),
        42,
        None,
    ],
)
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
