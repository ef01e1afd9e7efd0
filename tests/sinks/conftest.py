"""A receiver, and a post that may call it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.sinks.receiver import Receiver, receiving
from tests.waiting import PATIENCE

from bide.sinks.webhook import WebhookPost, WebhookResult


@pytest.fixture(autouse=True)
def patient_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of an answer is waited for, however slow the machine is."""
    monkeypatch.setattr("bide.sinks.webhook.sending.BODY_PATIENCE", PATIENCE)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    """It answers 200 until it is told otherwise."""
    async with receiving() as one:
        yield one


@pytest.fixture
def results() -> list[WebhookResult]:
    """What `post` has told its observer."""
    return []


@pytest.fixture
async def post(receiver: Receiver, results: list[WebhookResult]) -> AsyncIterator[WebhookPost]:
    """Open, and allowed to call the receiver by its host and port."""
    async with WebhookPost(allow=[receiver.place], observe=results.append) as one:
        yield one
