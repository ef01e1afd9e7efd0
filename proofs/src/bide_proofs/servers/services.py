"""`scripts/services`: start the servers that tests share, and install their programs.

scripts/services install                              install missing programs, if allowed; also Chromium, for the
                                                      tests of the console
scripts/services start [redis] [cluster] ...          until Ctrl-C or SIGTERM; prints the URLs
scripts/services run [redis] ... -- COMMAND ...       while COMMAND runs, with the URLs in its environment

The kinds are redis, cluster, sentinel, postgres, mysql and rabbitmq; by default all. The tests read their URLs from
TEST_REDIS_URL, TEST_REDIS_CLUSTER_URL, TEST_REDIS_SENTINEL_URL, TEST_POSTGRES_URL, TEST_MYSQL_URL and
TEST_RABBITMQ_URL; a kind whose variable is set already is not started. The data is in a temporary folder, which is
removed afterwards.

scripts/services --with rocketmq start [redis] ...    RocketMQ 5 too, at TEST_ROCKETMQ_URL; with no other kind, alone

RocketMQ needs a JDK and Maven, which downloads 100 MB once, into a folder in your cache directory.

The packages are Debian's and Ubuntu's. When they are installed, they start their services on the usual ports; a policy
prevents this during the installation, and only for these services. A service that ran before goes on, since installed
packages are not changed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bide_proofs.servers import postgres, rabbitmq, server
from bide_proofs.servers.mariadb import MariaDbPair, MariaDbServer
from bide_proofs.servers.postgres import PostgresServer
from bide_proofs.servers.process import ServerFailed, ServerMissing, program
from bide_proofs.servers.rabbitmq import RabbitMqServer
from bide_proofs.servers.redis import RedisServer
from bide_proofs.servers.redis_replicas import RedisCluster, RedisSentinel
from bide_proofs.servers.rocketmq import RocketMqServer
from bide_proofs.servers.server import Running

_NEVER = 600_000
"""Milliseconds until a replica takes over: so long that a machine that stands still for a second causes no failover."""
_POLICY = Path("/usr/sbin/policy-rc.d")
"""The program that Debian's packages call before they start or stop a service; exit code 101 forbids it."""

_OURS = """#!/bin/sh
# Made by bide's scripts/services while it installs packages, and of no effect when that is over.
kill -0 {pid} 2>/dev/null || exit 0
case "$1" in redis*|postgresql*|pgbouncer*|mariadb*|mysql*|rabbitmq*|epmd*) exit 101 ;; esac
exit 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of server."""

    variable: str
    """The environment variable with the URL of a server that runs already."""
    make: Callable[[Path], Running]
    """Makes a server, with its data below the given folder, without starting it."""
    asked_for: bool = False
    """True if it is started only on request by name, since it is large or few tests need it."""


KINDS: Mapping[str, Kind] = {
    "redis": Kind(variable="TEST_REDIS_URL", make=RedisServer),
    "cluster": Kind(variable="TEST_REDIS_CLUSTER_URL", make=partial(RedisCluster, node_timeout=_NEVER)),
    "sentinel": Kind(variable="TEST_REDIS_SENTINEL_URL", make=partial(RedisSentinel, down_after=_NEVER)),
    "postgres": Kind(variable="TEST_POSTGRES_URL", make=PostgresServer),
    "mysql": Kind(variable="TEST_MYSQL_URL", make=MariaDbServer),
    "mysql_replica": Kind(variable="TEST_MYSQL_REPLICA_URL", make=MariaDbPair, asked_for=True),
    "rabbitmq": Kind(variable="TEST_RABBITMQ_URL", make=RabbitMqServer),
    "rocketmq": Kind(variable="TEST_ROCKETMQ_URL", make=RocketMqServer, asked_for=True),
}
OF_REDIS = ("redis", "cluster", "sentinel")
"""The kinds of Redis."""


class SharedServers:
    """One server of each kind, started at the first use, and not at all if the environment names one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started = ExitStack()
        self.urls: dict[str, str] = {}
        """The URLs used so far, by kind."""

    def url(self, kind: str) -> str:
        """The URL of a server of the `kind`. Raises ServerMissing, ServerFailed."""
        if kind not in self.urls:
            url = os.environ.get(KINDS[kind].variable)
            self.urls[kind] = url or self._started.enter_context(KINDS[kind].make(self._folder / kind)).url
        return self.urls[kind]

    def stop(self) -> None:
        """Stop the servers that were started here."""
        self._started.close()


# --- their programs


class InstallFailed(Exception):
    """A package could not be installed; the message has the reason and the manual steps."""


def chromium() -> str:
    """The browser for the console's tests: Debian's Chromium, or the one in TEST_CHROMIUM.

    Raises ServerMissing.
    """
    named = os.environ.get("TEST_CHROMIUM")
    names = (named,) if named else ("chromium", "chromium-browser", "google-chrome")
    found = next((place for name in names if (place := shutil.which(name))), None)
    if found is None:
        if named:
            raise ServerMissing(f"TEST_CHROMIUM names {named!r}, which is no program")
        raise ServerMissing("chromium is not installed: scripts/services install, or apt-get install chromium")
    return found


PACKAGES: Mapping[str, Callable[[], object]] = {
    # for Sentinel too: redis-sentinel is another name for the same program
    "redis-server": partial(program, "redis-server", "redis-server"),
    "redis-tools": partial(program, "redis-cli", "redis-tools"),
    "libfaketime": server.library,
    "postgresql": partial(postgres.binary, "initdb"),
    "mariadb-server": lambda: program("mariadbd", "") and program("mariadb-install-db", ""),
    "rabbitmq-server": lambda: rabbitmq.binary("rabbitmq-server") and rabbitmq.binary("epmd"),
    "openssl": partial(program, "openssl", "openssl"),  # makes the certificates for TLS
    "pgbouncer": partial(program, "pgbouncer", "pgbouncer"),
    "chromium": chromium,
}
"""Each package, with a function that finds its program, whatever its origin."""


def missing() -> list[str]:
    def is_there(find: Callable[[], object]) -> bool:
        try:
            return bool(find())
        except ServerMissing:
            return False

    return [package for package, find in PACKAGES.items() if not is_there(find)]


def install() -> list[str]:
    """Install the missing packages; return their names. Raises InstallFailed."""
    wanted = missing()
    if wanted:
        lacking = f"{', '.join(wanted)} missing"
        by_hand = f"install by hand: sudo apt-get install {' '.join(wanted)}"
        if shutil.which("apt-get") is None:
            raise InstallFailed(f"{lacking}, and there is no apt-get; install them as your system does")
        if os.geteuid() != 0:
            raise InstallFailed(f"{lacking}, and only root may install; {by_hand}")
        with _services_held(by_hand):
            # separately, since Ubuntu has it under another name, which must not prevent the servers' installation
            alone = [name for name in wanted if name == "chromium"]
            problems = [_get(some) for some in ([name for name in wanted if name not in alone], alone) if some]
        if (problem := "\n".join(filter(None, problems))) or missing():
            raise InstallFailed(f"{problem}\napt-get could not install {', '.join(missing())}; {by_hand}")
    return wanted


def _get(packages: Sequence[str]) -> str:
    """Install packages. Returns the output of apt-get if it failed, else an empty string."""
    command = ("install", "-y", "--no-install-recommends", "--no-upgrade", *packages)
    problem = _apt(*command)
    if problem:  # the lists of packages may be old or missing
        _apt("update")
        problem = _apt(*command)
    return problem


def _apt(*words: str) -> str:
    """Run apt-get. Returns its output if it failed, else an empty string.

    An interrupt waits: a partial installation is worse than a delay.
    """
    process = subprocess.Popen(
        ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=120", *words],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate()
    except BaseException:
        process.communicate()
        raise
    return f"{said.strip()}\n(exit code {process.returncode})" if process.returncode else ""


@contextlib.contextmanager
def _services_held(by_hand: str) -> Iterator[None]:
    """Keep these services from starting meanwhile. Raises InstallFailed if an existing policy would let one start."""
    try:
        descriptor = os.open(_POLICY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755)
    except FileExistsError:  # most likely a container's policy, which forbids every start
        if subprocess.run([_POLICY, "redis-server", "start"], check=False, capture_output=True).returncode != 101:
            raise InstallFailed(f"{_POLICY} allows that Redis' own service is started; {by_hand}") from None
        yield
        return
    try:
        with open(descriptor, "w", encoding="ascii") as policy:
            os.fchmod(descriptor, stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
            policy.write(_OURS.format(pid=os.getpid()))
        yield
    finally:
        _POLICY.unlink(missing_ok=True)


# --- the command


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    usual = [name for name, kind in KINDS.items() if not kind.asked_for]
    more = [name for name, kind in KINDS.items() if kind.asked_for]
    parser = argparse.ArgumentParser(
        prog="scripts/services", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=("install", "start", "run"))
    parser.add_argument("kinds", nargs="*", metavar="redis|cluster|sentinel|postgres|mysql|rabbitmq")
    parser.add_argument("--with", dest="more", action="append", default=[], choices=more, help="one more kind")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given, command = parser.parse_args(arguments[:end]), arguments[end + 1 :]
    kinds: list[str] = given.kinds or ([] if given.more else usual)
    if unknown := [kind for kind in kinds if kind not in usual]:
        parser.error(f"{unknown[0]!r} is not accepted; give {', '.join(usual)}")
    if (given.verb == "run") != bool(command):
        parser.error("run, and only run, is followed by -- and a command")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        if given.verb == "install":
            if installed := install():
                said = f"installed {', '.join(installed)}; none of their services was started"
                sys.stdout.write(f"scripts/services: {said}\n")
            return 0
        return _with_servers([*kinds, *given.more], command)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (InstallFailed, ServerMissing, ServerFailed) as error:
        sys.stderr.write(f"scripts/services: {error}\n")
        return 1


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
    """Run `command`; return its exit code, or 128 plus the signal that ended it, as in a shell."""
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
            except KeyboardInterrupt:  # the command got the same Ctrl-C, and ends after its clean-up
                continue
    except SystemExit:
        process.terminate()
        process.wait()
        raise
    return code if code >= 0 else 128 - code
