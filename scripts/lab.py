"""`make lab`: starts the servers that can be had, measures the strategies of the lab on them, and draws the report.

make lab                                    what each strategy is known for, in short: some seven minutes
make lab ARGS="--full"                      everything, in full length: about an hour
make lab ARGS="--with rocketmq"             RocketMQ too, where Maven, a JDK and cc answer; installs its client

All else is passed on to `bide lab run`. A server whose program is missing is told, and its strategies are listed in the
report as not measured. A run that was interrupted is taken up again by the same command.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent / "proofs" / "src")

from bide_proofs.servers.process import ServerFailed, ServerMissing  # noqa: E402 - found in the clone
from bide_proofs.servers.services import KINDS, SharedServers  # noqa: E402

_WANTED = ("redis", "postgres", "mysql", "mysql_replica", "rabbitmq")
_RESULTS = "lab-results.jsonl"
_REPORT = "lab-report"


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    given = list(arguments)
    kinds = list(_WANTED)
    while "--with" in given:
        at = given.index("--with")
        kinds += given[at + 1 : at + 2]
        del given[at : at + 2]
    if "rocketmq" in kinds and importlib.util.find_spec("rocketmq") is None:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "-e", "lab[rocketmq]"], check=True)
    length = [] if "--full" in given else ["--quick"]
    given = [word for word in given if word != "--full"]
    results = [] if "--results" in given else ["--results", _RESULTS]
    with tempfile.TemporaryDirectory(prefix="lab-servers-") as folder:
        servers = SharedServers(Path(folder))
        try:
            urls = {KINDS[kind].variable: url for kind in kinds if (url := _url(servers, kind))}
            code = _bide({**os.environ, **urls}, "lab", "run", *length, *results, *given)
        finally:
            servers.stop()
    named = given[given.index("--results") + 1] if "--results" in given else _RESULTS
    return _bide(dict(os.environ), "lab", "report", "--results", named, "--out", _REPORT) or code


def _url(servers: SharedServers, kind: str) -> str:
    """Where a server of the kind is; empty, and told, if there is none to be had."""
    try:
        return servers.url(kind)
    except (ServerMissing, ServerFailed) as error:
        print(f"bide: {error}; its strategies are not measured", file=sys.stderr)
        return ""


def _bide(environment: dict[str, str], *words: str) -> int:
    return subprocess.run([sys.executable, "-m", "bide", *words], env=environment, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
