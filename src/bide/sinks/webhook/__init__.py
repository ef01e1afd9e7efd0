"""Posts tasks to URLs: signed, guarded, and limited per host. Needs aiohttp."""

from __future__ import annotations

from bide.sinks.webhook.sending import Observe, WebhookResult
from bide.sinks.webhook.sink import URL_HEADER, WebhookPost, WebhookSink

__all__ = ["URL_HEADER", "Observe", "WebhookPost", "WebhookResult", "WebhookSink"]
