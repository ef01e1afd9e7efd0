"""E5, the payment notification: tell the merchant until it has heard, less and less often."""

from __future__ import annotations

import http.client

import msgspec

from bide.app import Bide
from bide.cli.demo.merchants import BOOK_SHOP, NOODLE_BAR, TEA_HOUSE, Merchants
from bide.cli.demo.pace import Scale
from bide.cli.demo.story import Story, act
from bide.core.outcomes import Retry
from bide.core.retry import PRESETS, Ladder, Rungs
from bide.core.tasks import Task


class Payment(msgspec.Struct):
    merchant: str
    cents: int


class Payments(Story):
    code = "E5"
    title = "Payment notification"
    scale = Scale("1m", "2s")
    topics = ("payment.notify",)

    def define(self, app: Bide) -> None:
        # A plain function: it may block, since it runs in a thread.
        @app.handler("payment.notify")
        def notify(task: Task[Payment]) -> None:
            try:
                status = self._post(task)
            except OSError as error:
                self.fired(task, "timeout" if isinstance(error, TimeoutError) else "no answer", failed=True)
                raise Retry(f"{task.payload.merchant}: {error}") from error
            self.fired(task, f"{status}", failed=status != 200)
            if status != 200:
                raise Retry(f"{task.payload.merchant} answered {status}")

        self.notify = notify

    def _post(self, task: Task[Payment]) -> int:
        seconds = self.pace.length("15s").total_seconds()
        connection = http.client.HTTPConnection("127.0.0.1", self.merchants.port, timeout=seconds)
        try:
            # The id stays the same over all tries, so that the merchant can tell a repetition from a second payment.
            headers = {"content-type": "application/json", "webhook-id": task.id}
            connection.request("POST", f"/{task.payload.merchant}", task.payload_bytes, headers)
            return connection.getresponse().status
        finally:
            connection.close()

    @act("0m")
    async def three_payments_succeed(self) -> None:
        for merchant, cents in ((BOOK_SHOP, 4200), (TEA_HOUSE, 380), (NOODLE_BAR, 1250)):
            await self.notify.schedule(Payment(merchant, cents), key=merchant, delay="0s", retry=self._ladder())
            self.said(merchant, f"paid {cents / 100:.2f}")

    def _ladder(self) -> Rungs:
        """`retry="merchant-notify"`, in this story's time: 15s 15s 30s 3m 10m 20m 30m 1h 2h 6h 15h."""
        preset = PRESETS["merchant-notify"]
        assert isinstance(preset, Rungs)
        return Ladder(*(self.pace.length(rung) for rung in preset.rungs))

    async def enter(self) -> None:
        self.merchants = await Merchants.serve(self.pace)

    async def leave(self) -> None:
        await self.merchants.close()
