"""`bide token add`, `ls` and `revoke`: the access tokens of `bide serve`."""

from __future__ import annotations

from typing import Any

import click

from bide.app import Bide
from bide.cli.context import Context, NamedCommands, shared_options, takes_context, without_password
from bide.cli.exits import Exit
from bide.cli.output import moment_words, print_json, printable
from bide.core.errors import BadInput
from bide.core.instants import LAST_INSTANT, Millis, duration, instant_text
from bide.engine.settings_store import SettingsStore
from bide.service.access import ALL_VERBS, Token, Tokens, Verb, check_id, check_pattern, verbs_of


@click.group(cls=NamedCommands, no_args_is_help=False, subcommand_metavar="add|ls|revoke ...")
@shared_options()
def token() -> None:
    """Make, list and revoke the access tokens of `bide serve`.

    The store keeps them, so that every instance that serves it knows them: it accepts a new one within a second, and
    refuses a revoked one within five.
    """


@token.command(short_help="Make a token and print it, this once.")
@click.argument("name")
@click.option(
    "--verb", "verbs", multiple=True, metavar="VERB",
    help=f"A verb it allows; may be given several times: {', '.join(Verb)}, or all. By default all but admin.",
)  # fmt: skip
@click.option(
    "--topic", "topics", multiple=True, metavar="PATTERN",
    help='Topics it allows; may be given several times; * stands for any characters: "order.*". By default all.',
)  # fmt: skip
@click.option("--expires", metavar="LENGTH", help='When it expires, as a duration from now: "90d". By default never.')
@takes_context()
def add(context: Context, name: str, verbs: tuple[str, ...], topics: tuple[str, ...], expires: str | None) -> Exit:
    """Make a token for NAME and print it, this once, since only a hash of it is kept.

    NAME stands for the caller in the event log and the audit log. Two tokens may have the same name, so that one can
    replace the other.
    """
    allowed = verbs_of(verbs)
    patterns = tuple(check_pattern(topic) for topic in topics) or ("*",)
    lasts = None if expires is None else _length(expires)

    async def work(app: Bide) -> tuple[Token, str]:
        now = app.clock.now()
        return await _tokens(app).add(
            name, verbs=allowed, topics=patterns, now=now,
            expires_at=None if lasts is None else min(now + lasts, LAST_INSTANT), by=app.actor,
        )  # fmt: skip

    made, text = context.open(work, make=True)
    context.say({**_shape(made), "token": text}, text)
    if not context.json:
        click.echo(
            f"bide: note: token {made.id} of {printable(made.name)}, who may {_verbs_words(made)} on "
            f"{printable(', '.join(made.topics))}; it is not shown again",
            err=True,
        )
    return Exit.DONE


@token.command(short_help="List the tokens, without their secrets.")
@takes_context()
def ls(context: Context) -> Exit:
    """List the tokens: their names and what they allow, never the tokens themselves."""

    async def work(app: Bide) -> Exit:
        damaged: list[str] = []
        tokens, now = await _tokens(app).all(damaged.append), app.clock.now()
        if context.json:
            for one in tokens:
                print_json(_shape(one))
        elif tokens:
            _print(tokens, now)
        else:
            click.echo(f"no tokens in {context.shown_store}")
        for id in damaged:
            click.echo(f"bide: note: token {id} cannot be read and is refused; revoke it", err=True)
        return Exit.DONE

    return context.open(work)


@token.command(short_help="Revoke a token.")
@click.argument("id")
@takes_context()
def revoke(context: Context, id: str) -> Exit:
    """Revoke the token with this ID: every instance refuses it within five seconds."""
    check_id(id)

    async def work(app: Bide) -> tuple[bool, int]:
        tokens = _tokens(app)
        revoked = await tokens.revoke(id)
        return revoked, len(await tokens.all())

    revoked, left = context.open(work)
    context.say({"id": id, "revoked": revoked}, f"token {id}: {'revoked' if revoked else 'not found'}")
    if revoked and not left:
        click.echo("bide: note: no token is left: a service on loopback accepts anybody again", err=True)
    return Exit.DONE if revoked else Exit.NOT_DONE


def _tokens(app: Bide) -> Tokens:
    if app.url.startswith(("http:", "https:")):
        accepted = "the URL of the store itself: a service gives no access to its own tokens"
        raise BadInput("store", without_password(app.url), accepted)
    return Tokens(SettingsStore(app.store, app.clock))


def _length(expires: str) -> Millis:
    length = duration(expires, field="--expires")
    if not length:
        raise BadInput("--expires", expires, 'a duration above zero, such as "90d"')
    return length


def _verbs_words(one: Token) -> str:
    verbs = frozenset(one.verbs)
    if verbs == ALL_VERBS:
        return "do all"
    if len(verbs) > len(ALL_VERBS) / 2:
        return f"do all but {', '.join(verb for verb in Verb if verb not in verbs)}"
    return ", ".join(one.verbs)


def _shape(one: Token) -> dict[str, Any]:
    return {
        "id": one.id,
        "name": one.name,
        "verbs": [verb.value for verb in one.verbs],
        "topics": list(one.topics),
        "created_at": instant_text(one.created_at),
        "created_by": one.created_by,
        "expires_at": None if one.expires_at is None else instant_text(one.expires_at),
    }


def _print(tokens: list[Token], now: Millis) -> None:
    from bide.cli.tables import cells, console, plain_table

    table = plain_table("id", "name", "may", "on", "made", "expires")
    for one in tokens:
        expires = "never" if one.expires_at is None else moment_words(one.expires_at, now)
        made = f"{moment_words(one.created_at, now)}{'' if one.created_by is None else f' by {one.created_by}'}"
        style = "red" if one.expired(now) else ""
        table.add_row(*cells(one.id, one.name, _verbs_words(one), ", ".join(one.topics), made, (expires, style)))
    console().print(table)
