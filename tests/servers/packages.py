"""Installing the programs that the tests' servers are, and a browser, from Debian's and Ubuntu's packages.

These packages start services of their own when they are installed, on the ports that everybody uses. A policy keeps
them from that while we install, and nobody else: one that ran before goes on, since a package that is there is left as
it is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.servers.child import ServerMissing
from tests.servers.chromium import chromium
from tests.servers.mariadb_server import binary as mariadb_binary
from tests.servers.postgres_server import binary
from tests.servers.rabbitmq_server import binary as rabbitmq_binary
from tests.servers.server_clock import library

_POLICY = Path("/usr/sbin/policy-rc.d")
"""What Debian's packages ask before they start or stop a service; exit code 101 is no."""

_OURS = """#!/bin/sh
# Made by bide's scripts/services while it installs packages, and of no effect when that is over.
kill -0 {pid} 2>/dev/null || exit 0
case "$1" in redis*|postgresql*|pgbouncer*|mariadb*|mysql*|rabbitmq*|epmd*) exit 101 ;; esac
exit 0
"""


class InstallFailed(Exception):
    """What is missing could not be installed; says why, and what to do by hand."""


def _has_program(name: str) -> Callable[[], bool]:
    return lambda: shutil.which(name) is not None


def _has_faketime() -> bool:
    try:
        return library().exists()
    except ServerMissing:
        return False


def _has_postgres() -> bool:
    try:
        return bool(binary("initdb"))
    except ServerMissing:
        return False


def _has_mariadb() -> bool:
    try:
        return bool(mariadb_binary("mariadbd") and mariadb_binary("mariadb-install-db"))
    except ServerMissing:
        return False


def _has_rabbitmq() -> bool:
    try:
        return bool(rabbitmq_binary("rabbitmq-server") and rabbitmq_binary("epmd"))
    except ServerMissing:
        return False


def _has_chromium() -> bool:
    try:
        return bool(chromium())
    except ServerMissing:
        return False


PACKAGES: Mapping[str, Callable[[], bool]] = {
    "redis-server": _has_program("redis-server"),  # Sentinel too: redis-sentinel is another name for the same program
    "redis-tools": _has_program("redis-cli"),
    "libfaketime": _has_faketime,
    "postgresql": _has_postgres,
    "mariadb-server": _has_mariadb,
    "rabbitmq-server": _has_rabbitmq,
    "openssl": _has_program("openssl"),  # makes the certificates for TLS
    "pgbouncer": lambda: shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin") is not None,
    "chromium": _has_chromium,
}
"""Each package, and whether what it brings is there, from wherever it came."""


def missing() -> list[str]:
    return [package for package, is_there in PACKAGES.items() if not is_there()]


def install() -> list[str]:
    """The packages that were missing, and now are not. Raises `InstallFailed`."""
    wanted = missing()
    if wanted:
        lacking = f"{', '.join(wanted)} missing"
        by_hand = f"install by hand: sudo apt-get install {' '.join(wanted)}"
        if shutil.which("apt-get") is None:
            raise InstallFailed(f"{lacking}, and there is no apt-get; install them as your system does")
        if os.geteuid() != 0:
            raise InstallFailed(f"{lacking}, and only root may install; {by_hand}")
        with _services_held(by_hand):
            # apart, since Ubuntu has it under another name: the servers are not to be missing for that
            alone = [name for name in wanted if name == "chromium"]
            problems = [_get(some) for some in ([name for name in wanted if name not in alone], alone) if some]
        if (problem := "\n".join(filter(None, problems))) or missing():
            raise InstallFailed(f"{problem}\napt-get could not install {', '.join(missing())}; {by_hand}")
    return wanted


def _get(packages: Sequence[str]) -> str:
    """What apt-get said if it could not install them, else nothing."""
    command = ("install", "-y", "--no-install-recommends", "--no-upgrade", *packages)
    problem = _apt(*command)
    if problem:  # the lists of packages may be old, or not there at all
        _apt("update")
        problem = _apt(*command)
    return problem


def _apt(*words: str) -> str:
    """What apt-get said if it failed, else nothing. An interrupt waits: half an installation is worse than a delay."""
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
    """None of these services starts meanwhile. Raises `InstallFailed` where somebody else's policy would let it."""
    try:
        descriptor = os.open(_POLICY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755)
    except FileExistsError:  # in a container, most likely, and it says no to everything
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
