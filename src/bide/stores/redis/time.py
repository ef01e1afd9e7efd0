"""The server's clock, read off its answers: what it is to a store on Redis, as to every store on a server."""

from __future__ import annotations

from bide.stores.server_time import ServerTime, StoreClock

__all__ = ["ServerTime", "StoreClock"]
