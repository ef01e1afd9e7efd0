"""The verbs for synchronous code: from no loop, from threads, from a handler's thread, after a fork."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

from bide import Bide, SetupError, Task


def test_the_verbs_block_and_answer(tmp_path: Path) -> None:
    app = Bide(f"sqlite:///{tmp_path}/sync.db")
    assert app.sync.schedule("t", {"n": 1}, key="k", delay="1h").result == "created"
    assert app.sync.reschedule("t", "k", delay="2h").result == "moved"
    assert [task.key for task in app.sync.find(topic="t")] == ["k"]
    assert app.sync.cancel("t", "k").result == "cancelled"
    task = app.sync.get("t", "k")
    assert task is not None
    assert task.state == "cancelled"
    app.sync.close()
    app.sync.close()


def test_threads_share_it(tmp_path: Path) -> None:
    app = Bide(f"sqlite:///{tmp_path}/sync.db")
    words: list[str] = []

    def work(number: int) -> None:
        words.append(app.sync.schedule("t", key=str(number), delay="1h").result.value)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert words == ["created"] * 20
    assert len(list(app.sync.find(topic="t", page=7))) == 20
    app.sync.close()


async def test_a_plain_handler_uses_the_workers_own_loop() -> None:
    app = Bide("memory:")
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    @app.handler("first")
    def first(task: Task[Any]) -> None:
        app.sync.schedule("second", key="s", delay="0s")

    @app.handler("second")
    async def second(task: Task[Any]) -> None:
        loop.call_soon(done.set)

    async with app, app.worker():
        await app.schedule("first", delay="0s")
        await until(done.is_set, "the second handler to run")
        with pytest.raises(SetupError, match="await the verb"):
            app.sync.schedule("second", delay="0s")


def test_a_script_that_forgets_to_close_ends_quietly(tmp_path: Path) -> None:
    script = (
        f"from bide import Bide\napp = Bide('sqlite:///{tmp_path}/script.db')\n"
        "print(app.sync.schedule('t', key='k', delay='1h').result)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "created\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["script.db"], "the WAL is written back"


def test_a_memory_app_has_one_timeline() -> None:
    app = Bide("memory:")
    app.sync.schedule("t", key="early", delay="1h")

    async def look() -> list[str]:
        async with app:
            return [task.key async for task in app.find()]

    assert asyncio.run(look()) == ["early"]
    app.sync.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_opens_its_own(tmp_path: Path) -> None:
    app = Bide(f"sqlite:///{tmp_path}/sync.db")
    app.sync.schedule("t", key="parent", delay="1h")
    child = os.fork()
    if child == 0:
        os._exit(0 if app.sync.schedule("t", key="child", delay="1h").result == "created" else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert sorted(task.key for task in app.sync.find(topic="t")) == ["child", "parent"]
    app.sync.close()
