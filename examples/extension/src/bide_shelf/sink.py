"""A sink: each delivery is a line of JSON at the end of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bide import BadInput, Task


def sink_at(url: str) -> LinesSink:
    """What the entry point names: called with `lines:PATH`, as it stands in the file of `bide serve`."""
    path = url.partition(":")[2]
    if not path:
        raise BadInput("sink", url, "lines:PATH")
    return LinesSink(Path(path))


class LinesSink:
    """A `bide.ports.Sink`. What `deliver` raises is a failed delivery, and is tried again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def deliver(self, task: Task[Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"topic": task.topic, "key": task.key, "payload": task.payload}) + "\n")
