"""A child of `test_harness`: does what its spec says."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from bide_bench.worker import send, words
from bide_proofs.harness.processes import ready, spec_of


class Spec(msgspec.Struct, frozen=True):
    """The first line of its standard input."""

    does: str
    """"answers", "fails" or "finishes" as soon as it is asked, "stays" though it is told to end."""


async def _act(spec: Spec) -> None:
    sys.stderr.write(f"it {spec.does}\n")
    ready()
    async for word in words():
        if word == "stop":
            break
        if spec.does == "fails":
            raise SystemExit(3)
        if spec.does == "finishes":
            return
        send(**{word: spec.does})
    if spec.does == "stays":
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_act(spec_of(Spec)))
