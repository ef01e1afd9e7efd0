"""Requests that fuzzing found to be answered with a 5xx."""

from __future__ import annotations

from pathlib import Path

from msgspec import Raw

from bide.ports import wire
from bide.ports.wire import Call
from bide_proofs.fuzz.targets.requests import opened


async def test_a_subscription_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    body = wire.encode(Call("", 1, None, Raw(b"\x91" * 5_000 + b"\x01")))
    async with opened(tmp_path) as case:
        answered = await case.__self__.ask("POST", b"/v1/store/listen", b"", {}, body)  # type: ignore[attr-defined]
    assert answered.status == 422
