"""`bide serve` in a process of its own, as somebody who opens the console meets it, and what there is to be seen."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers.child import Child
from tests.service.calling import Api
from tests.service.console.browsing import PATIENCE

_STARTS_WITHIN = 60.0
_PATIENTLY = f"""
from bide.cli import main
from bide.service.console import site

site.PATIENCE = {PATIENCE}
main()
"""
"""`bide`, whose pages wait so long for their store."""
_SAID = re.compile(r"bide serve: (http://\S+) from")


class Served:
    """A running instance."""

    def __init__(self, url: str, store: str, child: Child) -> None:
        self.url = url
        self.store = store
        self.pid = child.pid
        self._child = child

    @property
    def log(self) -> str:
        return self._child.log.read_text(encoding="utf-8", errors="replace")

    @contextmanager
    def api(self, token: str | None = None) -> Iterator[Api]:
        """Calls it as a program does."""
        found = Api(self.url, token)
        yield found
        found.close()


@contextmanager
def serving(store: str, folder: Path, *words: str, patient: bool = True) -> Iterator[Served]:
    """`bide serve` on `store`, once it answers; its log is in `folder`. Raises `ServerFailed`.

    `patient`: not where the store is to be silent.
    """
    forgotten = [word for name in os.environ if name.startswith("BIDE_") for word in ("-u", name)]
    bide = ["-c", _PATIENTLY] if patient else ["-m", "bide"]
    command = ["env", *forgotten, sys.executable, *bide, "serve", "--store", store, "--port", "0", *words]
    child = Child(command, folder / "serve.log")
    try:
        yield Served(_until_ready(child), store, child)
    finally:
        child.end(signal.SIGTERM)


def _until_ready(child: Child) -> str:
    until = time.monotonic() + _STARTS_WITHIN
    while time.monotonic() < until:
        if not child.running:
            raise child.failed("ended while it started")
        if (said := _SAID.search(child.log.read_text(encoding="utf-8", errors="replace"))) and _ready(said[1]):
            return said[1]
        time.sleep(0.02)
    raise child.failed(f"did not answer within {_STARTS_WITHIN:.0f} s")


def _ready(url: str) -> bool:
    api = Api(url)
    try:
        return api("GET", "/readyz").status == 200
    except OSError:
        return False
    finally:
        api.close()


# --- what there is to be seen

ORDERS = [f"{4700 + number}" for number in range(6)]
"""Keys of waiting tasks of order.close."""
ODD = 'a/b "c" <i>d</i> 订单%'
"""A key that has to be escaped wherever it is shown."""


def fill_ten(api: Api) -> None:
    """Ten tasks: of four topics, in every state, with groups, errors, a payload each."""
    for number, key in enumerate(ORDERS):
        order = {"number": int(key), "customer": "Anna & Bo", "paid": False}
        api.put("order.close", key, delay=f"{number + 1}h", group=f"order-{number % 2}", payload=order)
    api.put("post.publish", ODD, delay="90m", payload="<script>alert(1)</script>")
    for key, error in (("n1", "merchant 17 answered 503"), ("n2", "merchant 4 answered 503")):
        api.put("payment.notify", key, delay="0s", payload={"merchant": key})
        [task] = api.lease("payment.notify")
        assert api.settle(task, "dead", error=error)
    api.put("coupon.remind", "c1", delay="0s", payload={"coupon": 1})
    [task] = api.lease("coupon.remind")
    assert api.settle(task, "done")


GROUP = "event-summer"
"""A group of `fill_group`."""


def fill_group(api: Api, number: int, topic: str = "event.remind") -> None:
    """So many tasks of one group, due tomorrow, a second apart."""
    for first in range(0, number, 500):
        asked = [
            {"topic": topic, "key": f"e{one}", "group": GROUP, "delay": f"{86_400 + one}s", "payload": {"guest": one}}
            for one in range(first, min(number, first + 500))
        ]
        answers = api.done("POST", "/v1/schedule", asked)
        assert {answer["answer"] for answer in answers} == {"created"}
