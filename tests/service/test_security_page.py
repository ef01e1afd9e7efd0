"""docs/security.md lists what was tried: every row names a test that is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path


def rows(root: Path) -> list[tuple[str, str, str]]:
    """Each attack, what happens, and the test that tries it."""
    text = (root / "docs" / "security.md").read_text(encoding="utf-8").partition("<!-- attacks:")[2]
    return re.findall(r"^\| (.+?) \| (.+?) \| `(.+?)` \|$", text, re.MULTILINE)


def test_every_attack_names_a_test_that_is_there(root: Path) -> None:
    found = rows(root)
    assert len(found) >= 18
    lines = (root / "docs" / "security.md").read_text(encoding="utf-8").partition("<!-- attacks:")[2].splitlines()
    assert len(found) == sum(line.startswith("| ") for line in lines) - 1, "a row that is not one of three cells"
    for attack, _, test in found:
        path, _, name = test.partition("::")
        tree = ast.parse((root / path).read_text(encoding="utf-8"))
        names = {
            f"{outer.name}::{node.name}" if isinstance(outer, ast.ClassDef) else node.name
            for outer in ast.walk(tree)
            if isinstance(outer, ast.Module | ast.ClassDef)
            for node in outer.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert not name or name in names, f"{attack}: {test}"
        assert any("test_" in one for one in names), f"{attack}: {test} has no tests"
