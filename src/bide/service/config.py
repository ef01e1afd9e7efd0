"""The file of `bide serve`: where the tasks of each topic go, and how they are worked on. TOML.

    keep_most = 10000                                # ended tasks of a topic that are remembered, at most
    connections = 4096                               # at once; further ones are answered 503
    proxies = ["10.0.0.5", "10.1.0.0/16"]            # whose X-Forwarded-For says who called; of nobody unless given

    [webhooks]
    allow = ["10.1.0.0/16", "hooks.internal:8080"]   # besides public addresses
    per_host = 20

    [topics."order.close"]
    webhook = "https://shop.example/hooks/close"     # or "per-task": each task names its own in its header `webhook`
    secrets_file = "/run/secrets/close"              # one whsec_... a line, the newest first
    retry = "merchant-notify"                        # a preset, a list of lengths, or a table of terms
    concurrency = 20
    timeout = "30s"
    keep_done = "1h"

    [topics."report.send"]
    sink = "slack://reports"                         # a sink that another distribution adds, by the scheme of its URL

A topic without either is for consumers: what it says then holds for what they lease.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from bide.core.errors import BadInput
from bide.core.names import check_topic
from bide.core.retry import RetryPolicy, policy
from bide.engine.terms import MOST
from bide.service.schemas import Terms, retries

PER_TASK = "per-task"
MOST_CONNECTIONS = 4_096


class TopicConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    """One topic."""

    webhook: str | None = None
    sink: str | None = None
    """The URL of a sink that another distribution adds: see `bide.extensions`."""
    secrets_file: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    connect_timeout: str = "5s"
    timeout: str = "30s"
    retry: str | list[str] | Terms | None = None
    concurrency: int | None = None
    losses: int | None = None
    keep_done: str | None = None
    keep_cancelled: str | None = None
    keep_dead: str | None = None

    def policy(self, where: str) -> RetryPolicy:
        """When to try again. Raises BadInput."""
        try:
            return policy(retries(self.retry))
        except BadInput as error:
            raise BadInput(f"{where}.retry", error.value, error.accepted) from None

    def secrets(self, where: str) -> list[str]:
        """Read the secrets that webhooks are signed with. Raises BadInput."""
        if self.secrets_file is None:
            return []
        try:
            lines = Path(self.secrets_file).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise BadInput(f"{where}.secrets_file", self.secrets_file, f"a readable file ({error})") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise BadInput(f"{where}.secrets_file", self.secrets_file, "a file with a whsec_... a line")
        return found


class WebhooksConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    """Settings of all webhooks."""

    allow: list[str] = field(default_factory=list)
    per_host: int = 20
    plain_http: bool = False
    """Allow webhooks to public addresses without TLS."""


class ServeConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    keep_most: Annotated[int, Meta(ge=0, le=10_000_000)] = MOST
    """Done, and as many cancelled, tasks of one topic that an instance remembers at most."""
    connections: Annotated[int, Meta(ge=1, le=1_000_000)] = MOST_CONNECTIONS
    """Of clients, at once."""
    proxies: list[str] = field(default_factory=list)
    """Addresses and networks of the proxies before this instance."""
    webhooks: WebhooksConfig = field(default_factory=WebhooksConfig)
    topics: dict[str, TopicConfig] = field(default_factory=dict)


def read_config(path: str) -> ServeConfig:
    """The file at `path`. Raises BadInput that names the field."""
    try:
        with open(path, "rb") as file:
            data = tomllib.load(file)
    except (OSError, ValueError) as error:
        raise BadInput("--config", path, f"the path of a readable TOML file ({error})") from None
    try:
        config = msgspec.convert(data, ServeConfig)
    except msgspec.ValidationError as error:
        raise BadInput("--config", path, f"the fields of docs/http.md ({error})") from None
    for topic, one in config.topics.items():
        check_topic(topic, f"{path}: topics")
        if one.sink is not None and one.webhook is not None:
            raise BadInput(f"{path}: topics.{topic}", "a webhook and a sink", "one of them")
    return config
