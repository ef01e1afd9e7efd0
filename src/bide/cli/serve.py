"""`bide serve`: the timeline over HTTP, with webhooks, until told to stop."""

from __future__ import annotations

import logging
import os

import click

from bide.cli.exits import Exit
from bide.cli.loops import run_loop
from bide.cli.surroundings import Surroundings, WholeNumber, shared_options
from bide.core.errors import MissingExtra
from bide.settings import PREFIX, Settings

_LEVELS = ("debug", "info", "warning", "error")


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option("--port", type=WholeNumber(0, 65_535), default=8420, show_default=True, help="The port; 0: a free one.")
@click.option("--config", "path", metavar="FILE", help="A TOML file: webhooks, and how topics are worked on.")
@click.option("--webhook", "webhooks", metavar="TOPIC=URL", multiple=True, help="Post the tasks of TOPIC to URL.")
@click.option("--allow", metavar="NETWORK|HOST:PORT", multiple=True, help="Webhooks may go there, though not public.")
@click.option("--insecure", is_flag=True, help="Let anybody in, also from other machines.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--log-level", type=click.Choice(_LEVELS), default="info", show_default=True)
@click.option("--uvloop", is_flag=True, help="Run on uvloop, which has to be installed.")
@shared_options(json=False)
@click.pass_obj
def serve(
    surroundings: Surroundings,
    host: str,
    port: int,
    path: str | None,
    webhooks: tuple[str, ...],
    allow: tuple[str, ...],
    insecure: bool,
    log_format: str,
    log_level: str,
    uvloop: bool,
) -> Exit:
    """Serve the timeline over HTTP: schedule from any language, receive by webhook, or lease and settle.

    Anybody on this machine may call as long as there is no token (bide token add). Listening beyond this machine needs
    one, or --insecure. The first SIGTERM or Ctrl-C drains, as `bide work` does; the second ends at once.
    """
    try:
        from bide.service import logs, running
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "prometheus_client"):
            raise
        raise MissingExtra("serve", "bide serve") from error
    config = running.config_of(path, webhooks, allow)
    logs.setup(log_level, json=log_format == "json")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # it says what bide says
    serving = running.serve(
        _settings(surroundings.store), config, host=host, port=port, insecure=insecure,
        shown_store=surroundings.shown_store,
    )  # fmt: skip
    run_loop(serving, uvloop=uvloop)
    return Exit.DONE


def _settings(store: str | None) -> Settings:
    """The environment's; a service remembers for an hour what ended, unless they say how long."""
    hour = {name: "1h" for name in ("keep_done", "keep_cancelled") if f"{PREFIX}{name.upper()}" not in os.environ}
    return Settings.from_env(store=store, **hour)
