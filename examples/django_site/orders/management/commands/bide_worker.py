"""`manage.py bide_worker`: works on the shop's tasks until it is told to stop (SIGTERM, Ctrl-C), and then drains."""

import asyncio
import signal
from typing import Any

from django.core.management.base import BaseCommand

from orders.tasks import app


class Command(BaseCommand):
    """See the module."""

    help = "Work on the shop's tasks until told to stop."

    def handle(self, *args: Any, **options: Any) -> None:
        asyncio.run(self._work())

    async def _work(self) -> None:
        told = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, told.set)
        async with app.worker():
            self.stdout.write("at work")
            self.stdout.flush()
            await told.wait()
