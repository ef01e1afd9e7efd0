"""What RocketMQ of our own needs, and that it is heard nowhere but here; the servers themselves are not started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers.child import ServerMissing
from tests.servers.rocketmq_server import RocketMqServer, class_path, loopback_library


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerMissing, match="java is not installed, and RocketMQ needs a JDK"):
        RocketMqServer(tmp_path / "server").start()
    with pytest.raises(ServerMissing, match="mvn is not installed, and RocketMQ needs Maven"):
        class_path()
    with pytest.raises(ServerMissing, match="cc is not installed, and RocketMQ needs a C compiler"):
        loopback_library()
    (tmp_path / "mvn").write_text("#!/bin/sh\necho no such artifact\nexit 1\n")
    (tmp_path / "mvn").chmod(0o755)
    with pytest.raises(ServerMissing, match=r"Maven could not fetch RocketMQ .*no such artifact"):
        class_path()


def test_a_class_path_is_taken_as_it_was_while_all_its_jars_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    jar = tmp_path / "one.jar"
    jar.touch()
    (tmp_path / "mvn").write_text(
        f'#!/bin/sh\necho >>{tmp_path}/called\nfor word; do case "$word" in *outputFile=*) printf %s {jar} '
        '>"${word#*=}" ;; esac; done\n'
    )
    (tmp_path / "mvn").chmod(0o755)
    assert (class_path(), class_path()) == (str(jar), str(jar))
    assert (tmp_path / "called").read_text() == "\n", "once"


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_what_would_listen_everywhere_listens_on_the_loopback_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = (
        "import socket\n"
        "for address in ('0.0.0.0', '127.0.0.2', '::'):\n"
        "    with socket.socket(socket.AF_INET6 if ':' in address else socket.AF_INET) as one:\n"
        "        one.bind((address, 0))\n"
        "        print(one.getsockname()[0], flush=True)\n"
    )
    environment = {**os.environ, "LD_PRELOAD": str(loopback_library())}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    found = done.stdout.split()
    assert found[:2] == ["127.0.0.1", "127.0.0.2"]
    assert found[2:] in (["::ffff:127.0.0.1"], []), "there may be no IPv6 here"
