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

from bide_proofs.servers import clock, postgres, rabbitmq
from bide_proofs.servers.process import ServerMissing, program

_POLICY = Path("/usr/sbin/policy-rc.d")
"""The program that Debian's packages ask before they start or stop a service; exit code 101 is no."""

_OURS = """#!/bin/sh
# Made by bide's scripts/services while it installs packages, and of no effect when that is over.
kill -0 {pid} 2>/dev/null || exit 0
case "$1" in redis*|postgresql*|pgbouncer*|mariadb*|mysql*|rabbitmq*|epmd*) exit 101 ;; esac
exit 0
"""


class InstallFailed(Exception):
    """Some package could not be installed; says why, and what to do by hand."""


def chromium() -> str:
    """The browser of the console's tests: Debian's Chromium, or the one that TEST_CHROMIUM names.

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


def _is_there(*finds: Callable[[], object]) -> Callable[[], bool]:
    """A check that is true if none of them raises ServerMissing."""

    def is_there() -> bool:
        try:
            return all(find() for find in finds)
        except ServerMissing:
            return False

    return is_there


PACKAGES: Mapping[str, Callable[[], bool]] = {
    # Sentinel too: redis-sentinel is another name for the same program
    "redis-server": _is_there(lambda: program("redis-server", "redis-server")),
    "redis-tools": _is_there(lambda: program("redis-cli", "redis-tools")),
    "libfaketime": _is_there(clock.library),
    "postgresql": _is_there(lambda: postgres.binary("initdb")),
    "mariadb-server": _is_there(lambda: program("mariadbd", ""), lambda: program("mariadb-install-db", "")),
    "rabbitmq-server": _is_there(lambda: rabbitmq.binary("rabbitmq-server"), lambda: rabbitmq.binary("epmd")),
    "openssl": _is_there(lambda: program("openssl", "openssl")),  # makes the certificates for TLS
    "pgbouncer": _is_there(lambda: program("pgbouncer", "pgbouncer")),
    "chromium": _is_there(chromium),
}
"""Each package, and whether what it brings is there, from wherever it came."""


def missing() -> list[str]:
    return [package for package, is_there in PACKAGES.items() if not is_there()]


def install() -> list[str]:
    """The packages that were missing, and now are not. Raises InstallFailed."""
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
    """Install them. Returns the output of apt-get if it failed, else nothing."""
    command = ("install", "-y", "--no-install-recommends", "--no-upgrade", *packages)
    problem = _apt(*command)
    if problem:  # the lists of packages may be old, or not there at all
        _apt("update")
        problem = _apt(*command)
    return problem


def _apt(*words: str) -> str:
    """Run apt-get. Returns its output if it failed, else nothing.

    An interrupt waits: half an installation is worse than a delay.
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
    """None of these services starts meanwhile. Raises InstallFailed where somebody else's policy would let it."""
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
