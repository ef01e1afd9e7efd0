"""Certificates for servers of the tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.servers.fixtures import not_installed

from bide_proofs.servers.process import ServerMissing

HOST = "127.0.0.1"


def certify(folder: Path) -> None:
    """An authority of our own, and a key for 127.0.0.1 that it has signed."""
    if shutil.which("openssl") is None:
        not_installed(ServerMissing("openssl is not installed: apt-get install openssl"))
    names = folder / "names"
    names.write_text(f"subjectAltName=IP:{HOST}\n", encoding="ascii")

    def openssl(*words: str | Path) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=authority")
    openssl("req", *new_key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=server")
    openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
            "-extfile", names, "-out", "server.crt")  # fmt: skip
