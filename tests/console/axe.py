"""axe-core, which finds what keeps people with a screen reader, a keyboard or weak sight from using a page.

It comes from npm, for tests alone, in the version that `package-lock.json` pins with its fingerprint; into a folder of
the user's cache directory, once for each content of that file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from playwright.sync_api import Page

from bide_proofs.servers.process import ServerMissing

_LOCK = Path(__file__).with_name("package-lock.json")
_RUN = """async () => {
  const found = await axe.run(document, {resultTypes: ["violations"]});
  return found.violations
    .filter(one => one.impact === "serious" || one.impact === "critical")
    .map(one => one.id + ": " + one.help + "\\n" +
      one.nodes.slice(0, 5).map(node => "    " + node.html.slice(0, 200) + "\\n    " +
        [...node.any, ...node.all, ...node.none].map(check => check.message).join("; ")).join("\\n"));
}"""


def axe_source() -> str:
    """Its script, fetched if it is not there. Raises `ServerMissing`."""
    fingerprint = hashlib.sha256(_LOCK.read_bytes()).hexdigest()[:12]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "bide" / f"axe-core-{fingerprint}"
    if not folder.exists():
        _fetch(folder)
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


def _fetch(folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise ServerMissing("npm is not installed, which fetches axe-core: apt-get install npm")
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(_LOCK.with_name(name), made)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=made, check=False, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise ServerMissing(f"npm cannot fetch axe-core:\n{done.stderr[-2_000:]}")
        with contextlib.suppress(OSError):  # another process was quicker
            made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def violations(page: Page, source: str) -> list[str]:
    """What is seriously or critically wrong with the page as it is shown now. Some 100 ms."""
    # evaluated from outside, so the page's own Content-Security-Policy stays in force for all that the page does
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(source)
    found: list[str] = page.evaluate(_RUN)
    return found
