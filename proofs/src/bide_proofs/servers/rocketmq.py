"""RocketMQ 5 of our own, on 127.0.0.1: a name server, and a broker with the proxy that clients connect to.

There is no package for it: Maven fetches its parts once into its own repository, and the class path is kept in the
user's cache directory. This takes 100 MB and a minute the first time, and each start takes some ten seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bide_proofs.servers.process import HOST, ServerMissing, free_port, listens, until
from bide_proofs.servers.server import ServerProcess

VERSION = "5.5.0"
TOPIC = "bide_lab"
"""The topic for delayed messages, configured at the start: clients of the proxy cannot create one."""
GROUPS = [f"{TOPIC}_{number:02}" for number in range(60)]
"""Consumer groups, configured at the start for the same reason."""
_POM, _LOOPBACK = (Path(__file__).with_name(name) for name in ("rocketmq_pom.xml", "rocketmq_loopback.c"))
_JAVA = ("-Xms256m", "-Xmx512m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC", "-Djava.net.preferIPv4Stack=true")
_OPENED = (
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED", "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED", "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
)  # fmt: skip
"""Packages that RocketMQ needs access to, as in its own scripts for Java 9 and later."""


def _tool(name: str, what: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ServerMissing(f"{name} is not installed, and RocketMQ needs {what}")
    return found


def _cache() -> Path:
    """The folder of the class path and of the library that restricts the processes to the loopback address."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "bide" / f"rocketmq-{VERSION}"


def class_path() -> str:
    """The class path; Maven fetches missing parts. Raises ServerMissing."""
    folder = _cache()
    kept = folder / "class-path"
    if kept.exists():
        known = kept.read_text()
        if all(Path(jar).exists() for jar in known.split(":")):
            return known
    maven = _tool("mvn", "Maven to fetch its parts")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pom.xml").write_text(_POM.read_text(encoding="utf-8").replace("VERSION", VERSION))
    done = subprocess.run(
        [maven, "-q", "-B", "dependency:build-classpath", f"-Dmdep.outputFile={kept}"], cwd=folder,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        kept.unlink(missing_ok=True)
        raise ServerMissing(f"Maven could not fetch RocketMQ {VERSION}: {done.stdout[-1000:]}")
    return kept.read_text()


def loopback_library() -> Path:
    """The library to preload, which makes sockets listen only on the loopback address. Raises ServerMissing."""
    library = _cache() / "loopback.so"
    if not library.exists():
        compiler = _tool("cc", "a C compiler, by which it is kept on the loopback address")
        library.parent.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        words = [compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(_LOOPBACK), "-ldl"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerMissing(f"cc: {done.stderr[-500:]}")
        made.rename(library)
    return library


class RocketMqServer(ServerProcess):
    """A name server, and a broker and its proxy in one process, with their data below `directory`.

    They pass written data to the operating system at once, and it reaches the disk a little later: RocketMQ's default.
    """

    title = "RocketMQ"
    patience = 300.0  # its virtual machine takes ten seconds of processor time

    def __init__(self, directory: Path, **given: Any) -> None:
        super().__init__(directory, **given)
        self._names_port = 0

    @property
    def url(self) -> str:
        return f"rocketmq://{HOST}:{self.port}"

    @property
    def data(self) -> Path:
        return self.home / "store"

    def fill(self) -> None:
        """Configure the topic and the groups that clients need."""
        config = self.data / "config"
        config.mkdir(parents=True)
        topic = {
            "topicName": TOPIC, "readQueueNums": 4, "writeQueueNums": 4, "perm": 6, "topicFilterType": "SINGLE_TAG",
            "attributes": {"message.type": "DELAY"},
        }  # fmt: skip
        (config / "topics.json").write_text(json.dumps({"topicConfigTable": {TOPIC: topic}}))
        groups = {"subscriptionGroupTable": {group: {"groupName": group} for group in GROUPS}}
        (config / "subscriptionGroup.json").write_text(json.dumps(groups))

    def prepare(self) -> None:
        """Start the name server, and write the configuration of the broker and the proxy."""
        self._names_port = free_port()
        (self.home / "namesrv.conf").write_text(f"listenPort={self._names_port}\nbindAddress={HOST}\n")
        self._configure(f"{HOST}:{self._names_port}")
        words = [*self._java(), "org.apache.rocketmq.namesrv.NamesrvStartup", "-c", "namesrv.conf"]
        self.begin_beside(words, "names")
        until(lambda: listens(self._names_port), "the name server", patience=self.patience)

    def environment(self) -> Mapping[str, str]:
        return {"LD_PRELOAD": str(loopback_library()), "ROCKETMQ_HOME": str(self.home)}

    def _java(self) -> Sequence[str]:
        java, jars = _tool("java", "a JDK of version 8 or later"), class_path()
        return [java, *_JAVA, *_OPENED, f"-Drocketmq.home.dir={self.home}", f"-Duser.home={self.home}", "-cp", jars]

    def command(self) -> Sequence[str]:
        return [
            *self._java(), "org.apache.rocketmq.proxy.ProxyStartup", "-pm", "local",
            "-n", f"{HOST}:{self._names_port}", "-bc", "broker.conf", "-pc", "proxy.json",
        ]  # fmt: skip

    def answers(self) -> bool:
        return listens(self.port)

    def _configure(self, names: str) -> None:
        settings: dict[str, Any] = {
            "brokerClusterName": "bide", "brokerName": "bide", "brokerId": 0, "brokerIP1": HOST, "bindAddress": HOST,
            "listenPort": _free_broker_port(), "haListenPort": free_port(), "namesrvAddr": names,
            "storePathRootDir": self.data, "storePathCommitLog": self.data / "commitlog",
            "mappedFileSizeCommitLog": 64 << 20, "mappedFileSizeTimerLog": 16 << 20, "diskMaxUsedSpaceRatio": 95,
            "autoCreateTopicEnable": "false", "traceTopicEnable": "false",
        }  # fmt: skip
        (self.home / "broker.conf").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        proxy = {
            "rocketMQClusterName": "bide", "proxyClusterName": "bide", "namesrvAddr": names,
            "grpcServerPort": self.port, "remotingListenPort": free_port(), "localServeAddr": HOST,
        }  # fmt: skip
        (self.home / "proxy.json").write_text(json.dumps(proxy))


def _free_broker_port() -> int:
    """A free port; the port two below it, which the broker uses too, is also free."""
    while True:
        port = free_port()
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port - 2))
            return port
