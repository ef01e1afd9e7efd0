"""`scripts/services`: the servers that tests share, started by hand, and their programs installed.

scripts/services install                              what is missing of the programs, where that may be done;
                                                      Chromium too, in which the console is tested
scripts/services start [redis] [cluster] ...          until Ctrl-C or SIGTERM; prints where they are
scripts/services run [redis] ... -- COMMAND ...       while COMMAND runs, which finds them in its environment

The kinds are redis, cluster, sentinel, postgres, mysql and rabbitmq; without one, all. They are named by
TEST_REDIS_URL, TEST_REDIS_CLUSTER_URL, TEST_REDIS_SENTINEL_URL, TEST_POSTGRES_URL, TEST_MYSQL_URL and
TEST_RABBITMQ_URL, which the tests read; a kind whose variable is set already is not started. The data is in a temporary
folder, and gone afterwards.

scripts/services --with rocketmq start [redis] ...    RocketMQ 5 too, at TEST_ROCKETMQ_URL; with no other kind, alone

RocketMQ needs a JDK and Maven, which fetches 100 MB of it once, into a folder in your cache directory.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from bide_proofs.servers.packages import InstallFailed, install
from bide_proofs.servers.process import ServerFailed, ServerMissing
from bide_proofs.servers.shared import KINDS, SharedServers


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    usual = [name for name, kind in KINDS.items() if not kind.asked_for]
    more = [name for name, kind in KINDS.items() if kind.asked_for]
    parser = argparse.ArgumentParser(
        prog="scripts/services", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("install", "start", "run"))
    parser.add_argument("kinds", nargs="*", metavar="redis|cluster|sentinel|postgres|mysql|rabbitmq")
    parser.add_argument("--with", dest="more", action="append", default=[], choices=more, help="one more kind")
    own, command = _parted(arguments)
    given = parser.parse_args(own)
    kinds: list[str] = given.kinds or ([] if given.more else usual)
    if unknown := [kind for kind in kinds if kind not in usual]:
        parser.error(f"{unknown[0]!r} is not accepted; give {', '.join(usual)}")
    if (given.verb == "run") != bool(command):
        parser.error("run, and only run, is followed by -- and a command")
    signal.signal(signal.SIGTERM, _ended)
    try:
        if given.verb == "install":
            return _install()
        return _with_servers([*kinds, *given.more], command)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (InstallFailed, ServerMissing, ServerFailed) as error:
        sys.stderr.write(f"scripts/services: {error}\n")
        return 1


def _parted(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The words before and after the first `--`."""
    if "--" not in arguments:
        return arguments, ()
    at = list(arguments).index("--")
    return arguments[:at], arguments[at + 1 :]


def _ended(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _install() -> int:
    if installed := install():
        sys.stdout.write(f"scripts/services: installed {', '.join(installed)}; none of their services was started\n")
    return 0


def _with_servers(kinds: Sequence[str], command: Sequence[str]) -> int:
    with ExitStack() as stack:
        servers = SharedServers(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="services-"))))
        stack.callback(servers.stop)
        found = {KINDS[kind].variable: servers.url(kind) for kind in kinds}
        if command:
            return _run(command, found)
        for variable, url in found.items():
            sys.stdout.write(f"{variable}={url}\n")
        sys.stdout.flush()
        signal.pause()
    return 0


def _run(command: Sequence[str], variables: dict[str, str]) -> int:
    """The exit code of `command`; 128 and the signal if one ended it, as a shell says it."""
    try:
        process = subprocess.Popen(command, env={**os.environ, **variables})
    except OSError as error:
        sys.stderr.write(f"scripts/services: {command[0]}: {error.strerror}\n")
        return 127
    try:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:  # it has had the same Ctrl-C, and ends when it has tidied up
                continue
    except SystemExit:
        process.terminate()
        process.wait()
        raise
    return code if code >= 0 else 128 - code
