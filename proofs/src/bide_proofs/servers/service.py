"""`bide serve` as a server of our own, over a store that is not its."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Mapping, Sequence

from bide_proofs.servers.process import HOST
from bide_proofs.servers.server import ServerProcess

_PATIENCE = 2.0


class ServiceProcess(ServerProcess):
    """One instance, which keeps its port over a restart. Its `store` is a URL, set before it starts."""

    title = "bide serve"
    store = ""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def environment(self) -> Mapping[str, str]:
        return {"BIDE_STORE": self.store}

    def command(self) -> Sequence[str]:
        return [sys.executable, "-m", "bide", "serve", "--port", str(self.port), "--log-level", "warning"]

    def answers(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/healthz", timeout=_PATIENCE) as answer:
            return bool(answer.status == 200)
