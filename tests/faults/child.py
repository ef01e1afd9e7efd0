"""A child of `test_harness`: does what its spec says."""

from __future__ import annotations

import sys

import msgspec

from bide_proofs.harness.processes import Parent, ready, run, say, spec_of


class Spec(msgspec.Struct, frozen=True):
    """The first line of its standard input."""

    does: str
    """"answers", "fails" or "finishes" as soon as it is asked, "stays" though it is told to end."""


async def _act(spec: Spec, parent: Parent) -> None:
    sys.stderr.write(f"it {spec.does}\n")
    ready()
    async for word in parent.words():
        if spec.does == "fails":
            raise SystemExit(3)
        if spec.does == "finishes":
            return
        say(**{word: spec.does})
    if spec.does == "stays":
        await parent.over.wait()
        async for _ in Parent().words():
            pass


if __name__ == "__main__":
    given = spec_of(Spec)
    run(lambda parent: _act(given, parent))
