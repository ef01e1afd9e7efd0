"""Requests that somebody else's URL would have us make: stopped as the connection is made, over real connections."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.sinks.receiver import Receiver, receiving, says
from tests.sinks.test_webhook_faults import Names, why

from bide import Task
from bide.sinks.webhook import WebhookPost
from bide.testing import task_for

INSIDE = "127.0.0.1"
OUTSIDE = "127.0.0.2"
"""Stands for a public address: the only one that these posts are allowed to call."""


def task(url: str) -> Task[Any]:
    return task_for("order.close", {"number": 42}, key="42", headers={"webhook": url})


async def test_a_name_that_leads_inside(receiver: Receiver) -> None:
    """It may lead elsewhere next time, so the task is tried again; nothing is sent meanwhile."""
    async with WebhookPost(plain_http=True, resolver=Names([INSIDE])) as post:
        outcome = await post.sink(per_task=True).deliver(task(f"http://evil.example:{receiver.port}/"))
    assert f"refused: {INSIDE} is a loopback address" in why(outcome)
    assert receiver.connections == 0


async def test_a_name_that_is_bound_anew_between_two_deliveries() -> None:
    """DNS rebinding: outside when it was first looked at, inside when it counts."""
    async with (
        receiving(says(200, b"", "Connection: close"), host=OUTSIDE) as outside,
        receiving(host=INSIDE, port=outside.port) as inside,
    ):
        names = Names([OUTSIDE], [INSIDE])
        async with WebhookPost(allow=[OUTSIDE], plain_http=True, resolver=names) as post:
            sink, url = post.sink(per_task=True), f"http://evil.example:{outside.port}/"
            assert await sink.deliver(task(url)) is None
            post.session(trusted=False).connector.clear_dns_cache()  # type: ignore[union-attr]  # 10 seconds later
            outcome = await sink.deliver(task(url))
        assert names.asked == 2
        assert "refused" in why(outcome)
        assert len(outside.received) == 1
        assert inside.connections == 0


async def test_a_name_with_addresses_inside_and_outside_leads_outside_alone() -> None:
    async with receiving(host=OUTSIDE) as outside, receiving(host=INSIDE, port=outside.port) as inside:
        for order in ([INSIDE, OUTSIDE], [OUTSIDE, INSIDE]):
            async with WebhookPost(allow=[OUTSIDE], plain_http=True, resolver=Names(order)) as post:
                assert await post.sink(per_task=True).deliver(task(f"http://evil.example:{outside.port}/")) is None
        assert len(outside.received) == 2
        assert inside.connections == 0


async def test_a_name_whose_outside_does_not_answer_does_not_fall_back_to_the_inside() -> None:
    async with receiving(host=OUTSIDE) as gone:
        port = gone.port
    async with receiving(host=INSIDE, port=port) as inside:
        names = Names([OUTSIDE, INSIDE])
        async with WebhookPost(allow=[OUTSIDE], plain_http=True, resolver=names) as post:
            why(await post.sink(per_task=True).deliver(task(f"http://evil.example:{port}/")))
        assert inside.connections == 0


async def test_a_redirect_inside_is_not_followed(receiver: Receiver) -> None:
    async with receiving() as inside:
        receiver.answer = says(307, b"", f"Location: {inside.url}")
        async with WebhookPost(allow=[receiver.place]) as post:
            outcome = await post.sink(receiver.url).deliver(task("unused"))
        assert f"redirects are not followed (to {inside.url})" in why(outcome)
        assert inside.connections == 0
        assert len(receiver.received) == 1


async def test_an_allowed_host_does_not_lend_its_connections_to_a_name(receiver: Receiver) -> None:
    """The connection to the allowed host is kept; a name that leads to the same place is still refused."""
    names = Names([INSIDE])
    async with WebhookPost(allow=[receiver.place], plain_http=True, resolver=names) as post:
        sink = post.sink(per_task=True)
        assert await sink.deliver(task(receiver.url)) is None
        outcome = await sink.deliver(task(f"http://evil.example:{receiver.port}/"))
    assert "refused" in why(outcome)
    assert len(receiver.received) == 1


async def test_no_proxy_of_the_environment_is_used(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy connects where the guard does not see it; nor is a password taken from a netrc file."""
    async with receiving() as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://{proxy.place}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        async with WebhookPost(allow=[receiver.place]) as post:
            assert await post.sink(receiver.url).deliver(task("unused")) is None
        assert proxy.connections == 0
    assert "authorization" not in receiver.received[0].headers


def test_the_guard_holds_on_another_event_loop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def attack() -> tuple[int, list[str]]:
        async with receiving() as inside, WebhookPost(plain_http=True, resolver=Names([INSIDE])) as post:
            sink = post.sink(per_task=True)
            outcomes = [
                await sink.deliver(task(f"http://{name}:{inside.port}/")) for name in ("a.example", "b.example")
            ]
            return inside.connections, [why(outcome) for outcome in outcomes]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        connections, reasons = runner.run(attack())
    assert connections == 0
    assert all("is a loopback address" in reason for reason in reasons)
