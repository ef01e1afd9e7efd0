"""Tasks that are posted to URLs: signed, guarded, and a few at a time for each host. Needs aiohttp."""

from __future__ import annotations

from bide.sinks.webhook.sending import Observe, WebhookResult
from bide.sinks.webhook.sink import URL_HEADER, WebhookPost, WebhookSink

__all__ = ["URL_HEADER", "Observe", "WebhookPost", "WebhookResult", "WebhookSink"]
