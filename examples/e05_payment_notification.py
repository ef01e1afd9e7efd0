"""Payment notification: tell the merchant at once, then after 15 s, 15 s, 30 s, 3 min ... until the first success."""

import asyncio
import hmac
import logging
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from tempfile import TemporaryDirectory
from threading import Thread
from urllib.request import Request, urlopen

from bide import Bide, ScaledClock, Task

SPEED = 60  # a minute of the story takes a second
ANSWERS = [503, 200, 500, 502, 200]  # how the merchant answers, call by call; the second answer comes too late
logging.getLogger("bide").setLevel(logging.ERROR)  # each try says how the one before it failed
folder = TemporaryDirectory()  # gone when the program ends
app = Bide(f"sqlite:///{folder.name}/pay.db", clock=ScaledClock(SPEED))
seen: list[str] = []  # the id of each call that reached the merchant with a good signature


@dataclass
class Payment:
    order: int
    url: str


def sign(id_: str, body: bytes) -> str:
    return hmac.new(b"shared secret", id_.encode() + b"." + body, "sha256").hexdigest()


@app.handler("payment.notify", retry="merchant-notify")
def notify(task: Task[Payment]) -> None:  # what it raises is a failed try, and the ladder says when the next one is
    print(f"try {task.attempt}, {task.lateness.total_seconds() / SPEED:.3f} s late; before: {task.error}")
    signed = {"webhook-id": task.id, "webhook-signature": sign(task.id, task.payload_bytes)}
    urlopen(Request(task.payload.url, task.payload_bytes, signed), timeout=1).close()


class Merchant(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        id_, body = self.headers["webhook-id"], self.rfile.read(int(self.headers["content-length"]))
        assert hmac.compare_digest(self.headers["webhook-signature"], sign(id_, body))
        seen.append(id_)  # one id over all tries: by it the merchant knows that it has booked this payment already
        time.sleep(1.2 if len(seen) == 2 else 0)
        self.send_response_only(ANSWERS[len(seen) - 1])
        self.end_headers()


async def main() -> None:
    print(f"1 minute = {60 / SPEED:g} s")
    merchant = ThreadingHTTPServer(("127.0.0.1", 0), Merchant)
    Thread(target=merchant.serve_forever, daemon=True).start()
    async with app, app.worker() as worker:
        await notify.schedule(Payment(7, f"http://127.0.0.1:{merchant.server_port}/paid"), key="7", delay="0s")
        await worker.until_empty()
    assert seen == [seen[0]] * len(ANSWERS), seen


asyncio.run(main())
