"""`bide serve`: tasks over HTTP, with webhooks and a console; and `bide demo`, the same with live traffic."""

from __future__ import annotations

import logging
import os
from typing import Any

import click

from bide.app import Bide
from bide.cli.context import Context, WholeNumber, shared_options, takes_context, without_password
from bide.cli.exits import Exit, Shutdown, run_loop
from bide.core.errors import BadInput, MissingExtra
from bide.service.logs import LEVELS
from bide.settings import PREFIX, Settings

_EXTRA = ("jinja2", "markupsafe", "prometheus_client", "uvicorn")
_DEMO_STORE = "sqlite:///bide-console-demo.db"
_DEMO_KEEPS = 20_000
"""Finished tasks of a topic to remember: an hour of the demo's orders."""

_HOST = click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
_PORT = click.option(
    "--port", type=WholeNumber(0, 65_535), default=8420, show_default=True, help="The port; 0: any free one."
)


@click.command()
@_HOST
@_PORT
@click.option("--config", "path", metavar="FILE", help="A TOML file with webhooks and the settings of topics.")
@click.option("--webhook", "webhooks", metavar="TOPIC=URL", multiple=True, help="Post the tasks of TOPIC to URL.")
@click.option("--allow", metavar="NETWORK|HOST:PORT", multiple=True, help="Allow webhooks to this non-public address.")
@click.option("--insecure", is_flag=True, help="Let anybody in, from other machines too.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--log-level", type=click.Choice(LEVELS), help="The log level; info by default, warning with --demo.")
@click.option("--demo", is_flag=True, help="Run the demo: live traffic on a separate store.")
@click.option("--uvloop", is_flag=True, help="Run on uvloop, if it is installed.")
@takes_context(json=False)
def serve(
    context: Context, host: str, port: int, path: str | None, webhooks: tuple[str, ...], allow: tuple[str, ...],
    insecure: bool, log_format: str, log_level: str | None, demo: bool, uvloop: bool,
) -> Exit:  # fmt: skip
    """Serve tasks over HTTP: schedule from any language, receive by webhook, or lease and settle.

    As long as there is no token (bide token add), anybody on this machine may call. Listening for other machines takes
    a token, or --insecure. The first SIGTERM, SIGHUP or Ctrl-C drains, as in `bide work`; the second ends at once.

    With --demo the same process plays people who order, pay and change their minds, for the console at
    http://127.0.0.1:8420 to show. Their tasks are in bide-console-demo.db in this directory, or in --store, if it is
    empty.
    """
    try:
        from bide.service import logs, serving
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        raise MissingExtra("serve", "bide serve") from error
    config = serving.config_of(path, webhooks, allow)
    handler = logs.setup(log_level or ("warning" if demo else "info"), json=log_format == "json")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # it repeats what bide logs
    store = context.store
    companion: serving.Companion | None = None
    if demo:
        from bide.cli.demo.town import Town, uneventful

        app = Bide(settings=_demo_settings(_DEMO_STORE if store is None else store))
        companion = Town(app, shown_store=without_password(app.url), say=click.echo)
        if path is None:
            config.keep_most = _DEMO_KEEPS
        if log_level is None:
            handler.addFilter(uneventful)
            logging.getLogger("bide.serve").setLevel(logging.ERROR)  # the demo prints its address itself
    else:
        app = Bide(settings=Settings.from_env(store=store))
    if app.url.startswith(("http:", "https:")):
        raise BadInput("store", without_password(app.url), "the URL of the store itself, not of a service")
    running = serving.serve(
        app, config, host=host, port=port, insecure=insecure, shown_store=without_password(app.url),
        companion=companion, begin=Shutdown().begin,
    )  # fmt: skip
    run_loop(running, uvloop=uvloop)
    return Exit.DONE


@click.command()
@_HOST
@_PORT
@shared_options(json=False)
@click.pass_context
def demo(context: click.Context, host: str, port: int) -> Any:
    """Watch the console at http://127.0.0.1:8420 while a small town orders, pays and changes its mind.

    The same as `bide serve --demo`: in real time, in one process, until Ctrl-C. The tasks are in bide-console-demo.db
    in this directory, or in --store, if it is empty. Started again, the demo continues with them.
    """
    return context.invoke(serve, host=host, port=port, demo=True)


def _demo_settings(store: str) -> Settings:
    """The demo's settings: its store need not survive a power cut."""
    given = {"keep_cancelled": "15m", "sqlite_synchronous": "normal"}
    return Settings.from_env(
        store=store, **{name: value for name, value in given.items() if f"{PREFIX}{name.upper()}" not in os.environ}
    )
