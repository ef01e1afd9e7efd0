"""Kill instances of `bide serve` under load, and check bide's promises: see the package."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bide.testing.history.recording import read_all
from bide.wiring import without_secrets
from bide_proofs import kill_service
from bide_proofs.harness.command import WrongByKind, migrated, own_place, parser_of, tried
from bide_proofs.kill_service.instance import CONFIG, PORTS
from bide_proofs.kill_service.receiver import Receiver, judge
from bide_proofs.servers.process import HOST, free_port
from bide_proofs.torture.child import TOPICS
from bide_proofs.torture.faults import KILL, WORKER
from bide_proofs.torture.run import add_options, journals, tortured
from bide_proofs.torture.server import Server

COUNT = 2
_TOPIC = """
[topics.{topic}]
webhook = "http://{address}/hook"
secrets_file = "{secrets}"
retry = {{ policy = "exponential", first = "100ms", longest = "1s", tries = 100 }}
"""


class Services(Server):
    """The server of a run whose workers are the instances: their URLs, and the receiver to which they post."""

    name = "service"

    def __init__(self, url: str, receiver: Receiver, folder: Path) -> None:
        super().__init__(url)
        ports = [free_port() for _ in range(COUNT)]
        self.urls = [f"http://{HOST}:{port}" for port in ports]
        self.gives_back = urlsplit(url).scheme == "redis+cluster"
        self._receiver = receiver
        self._folder = folder
        self._config = folder / "serve.toml"
        self.environment = {PORTS: " ".join(map(str, ports)), CONFIG: str(self._config)}
        self._entered = AsyncExitStack()

    async def start(self) -> None:
        place = await self._entered.enter_async_context(own_place(self.direct, made=True))
        self.direct = self.worker_url = place.url
        await migrated(self.direct)
        await self._entered.enter_async_context(self._receiver)
        address, secrets = f"{HOST}:{self._receiver.port}", self._folder / "secrets"
        secrets.write_text(self._receiver.secret + "\n", encoding="ascii")
        topics = [_TOPIC.format(topic=topic, address=address, secrets=secrets) for topic in TOPICS]
        config = f'keep_most = 10000000\n[webhooks]\nallow = ["{address}"]\n{"".join(topics)}'
        self._config.write_text(config, encoding="utf-8")

    async def stop(self) -> None:
        await self._entered.aclose()

    def about(self) -> dict[str, Any]:
        return {"url": without_secrets(self.direct), "set-up": f"{COUNT} instances of bide serve"}


async def run(given: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], WrongByKind]:
    """Run once on the given store; return the report and the failures."""
    receiver = Receiver(given.seed)
    report, checked = await tortured(Services(given.url, receiver, folder), given, folder)
    wrong = {**checked, **judge(receiver.arrived, read_all(journals(folder)))}
    wrong["bad_delivery"] = receiver.bad
    effects = Counter(one.effect for one in receiver.arrived)
    report["receiver"] = {
        **dict(sorted(receiver.behaved.items())),
        "deliveries": {"all": len(receiver.arrived), **dict(sorted(effects.items()))},
    }  # fmt: skip
    return report, wrong


def main() -> int:
    parser = parser_of("bide_proofs.kill_service", kill_service.__doc__)
    parser.add_argument("url", help="a store that several processes can share, on this machine")
    add_options(parser, seconds=120, rate=200)
    parser.set_defaults(
        workers=COUNT, only=[f"{KILL} {WORKER}"], worker="bide_proofs.kill_service.instance", spare=1
    )  # fmt: skip
    given = parser.parse_args()
    return tried("kill_service", lambda folder: run(given, folder))


if __name__ == "__main__":
    sys.exit(main())
