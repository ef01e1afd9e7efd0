"""A `bide serve` before the store, which the client and the workers of a soak may reach it through."""

from __future__ import annotations

import msgspec

from bide.app import Bide
from bide.service import logs
from bide.settings import Settings
from bide_proofs.harness.child import run, spec_of
from bide_proofs.harness.service import serve


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of its standard input."""

    store: str
    port: int


if __name__ == "__main__":
    given = spec_of(Spec)
    logs.setup("warning", json=False)
    run(lambda parent: serve(Bide(settings=Settings.from_env(store=given.store)), parent, given.port))
