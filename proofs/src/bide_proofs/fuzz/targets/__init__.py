"""What is tried, in order of what a case costs."""

from __future__ import annotations

from collections.abc import Sequence

from bide_proofs.fuzz.running import Target
from bide_proofs.fuzz.targets import answers, cursors, files, given, requests, stored, text, urls, values

TARGETS: Sequence[Target] = (
    *text.TARGETS,
    *urls.TARGETS,
    *given.TARGETS,
    *stored.TARGETS,
    *cursors.TARGETS,
    *requests.TARGETS,
    *answers.TARGETS,
    *files.TARGETS,
    *values.TARGETS,
)
