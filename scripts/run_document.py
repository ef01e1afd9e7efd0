"""Run the code of a Markdown document: `python scripts/run_document.py README.md`, in the current directory.

Blocks run from top to bottom. Python blocks share one namespace and one event loop, and may use `await` at the top
level; one that begins with a comment like `# shop.py` is also saved under that name, and one that defines tests is run
by pytest. Shell blocks run when their first command is `bide`. A comment directly above a block takes it out:

    <!-- not run: it goes on until it is stopped -->
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import subprocess
import sys
import textwrap
import traceback
import types
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(
    r"(?:^[ ]*<!--[ ]not[ ]run:(?P<reason>[^\n]*)-->[ ]*\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
SHELLS = {"sh", "bash", "shell", "console"}


class Block(NamedTuple):
    """One fenced block of code."""

    language: str
    text: str
    line: int
    """The line of the document that its first line is on."""
    not_run: str | None
    """Why it is taken out; None when it is not."""

    @property
    def commands(self) -> str:
        """A shell block without its prompts and outputs."""
        if not re.search(r"^\$ ", self.text, re.MULTILINE):
            return self.text
        found, goes_on = [], False
        for line in self.text.splitlines():
            if line.startswith(("$ ", "> ")) or goes_on:
                found.append(line[2:] if line.startswith(("$ ", "> ")) else line)
            goes_on = bool(found) and found[-1].endswith("\\") and (line.startswith(("$ ", "> ")) or goes_on)
        return "\n".join(found)

    @property
    def runs(self) -> bool:
        if self.not_run is not None:
            return False
        first = re.sub(r"^(?:#[^\n]*\n|\s)*", "", self.commands)
        return self.language == "python" or (self.language in SHELLS and first.startswith("bide "))


def blocks_of(text: str) -> list[Block]:
    """The blocks of a document, in order."""
    return [
        Block(
            found["language"],
            textwrap.dedent(found["text"]),
            text.count("\n", 0, found.start("text")) + 1,
            None if found["reason"] is None else found["reason"].strip(),
        )
        for found in FENCE.finditer(text)
    ]


def run(path: Path) -> None:
    """Every block that runs, in order; the first that fails raises."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # where annotations are looked up
    sys.path.insert(0, os.getcwd())
    with asyncio.Runner() as runner:
        for block in blocks_of(path.read_text(encoding="utf-8")):
            if not block.runs:
                continue
            print(f"--- {path.name}:{block.line} ({block.language})", flush=True)
            if block.language == "python":
                run_python(block, path, module, runner)
            else:
                subprocess.run(["sh", "-euc", block.commands], check=True, stdin=subprocess.DEVNULL)


def run_python(block: Block, path: Path, module: types.ModuleType, runner: asyncio.Runner) -> None:
    named = re.match(r"# ([\w/]+\.py)\n", block.text)
    if named:
        Path(named[1]).write_text(block.text, encoding="utf-8")
    if re.search(r"^(async )?def test_", block.text, re.MULTILINE):
        tests = Path(f"test_line_{block.line}.py")
        tests.write_text(block.text, encoding="utf-8")
        arguments = ["-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--rootdir=.", str(tests)]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
        subprocess.run([sys.executable, "-m", "pytest", *arguments], check=True, stdin=subprocess.DEVNULL, env=environ)
        return
    source = "\n" * (block.line - 1) + block.text  # so that a traceback tells the document's line
    code = compile(source, str(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(eval(code, module.__dict__))
    else:
        exec(code, module.__dict__)


def main() -> int:
    try:
        run(Path(sys.argv[1]).resolve())
    except subprocess.CalledProcessError as error:
        print(f"exit code {error.returncode}", file=sys.stderr)
        return 1
    except Exception:  # noqa: BLE001 - whatever a document's code raises is a failed document
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
