"""`bide migrate`: make the schema in a database, or bring it up to date; or only say what that would take."""

from __future__ import annotations

import asyncio

import click

from bide.cli.context import Context, shared_options
from bide.cli.exits import Exit
from bide.cli.output import print_json
from bide.core.errors import BadInput
from bide.ports import HasSchema
from bide.wiring import store_maker


@click.command()
@click.option("--check", is_flag=True, help="Only say whether it is up to date: exit code 0 if so, else 1.")
@click.option("--print", "as_sql", is_flag=True, help="Print the missing statements, and run none of them.")
@shared_options()
@click.pass_obj
def migrate(context: Context, check: bool, as_sql: bool) -> Exit:
    """Make the schema in a database, or bring it up to date. Any number of processes may do so at once.

    It only adds what older versions can live with, so others may go on meanwhile. It needs more rights than the rest of
    bide: docs/sql.md lists them. Stores that look after themselves (a SQLite file, Redis) have nothing to be done.
    """
    if check and as_sql:
        raise BadInput("--check", "together with --print", "one of the two")
    settings = context.settings()
    store = store_maker(settings.store, settings)()
    if not isinstance(store, HasSchema):
        return _by_itself(context)
    return asyncio.run(_migrate(context, store, check=check, as_sql=as_sql))


async def _migrate(context: Context, store: HasSchema, *, check: bool, as_sql: bool) -> Exit:
    missing = await store.plan()
    if missing is None:
        return _by_itself(context)
    if as_sql:
        _print(missing, as_json=context.json)
        return Exit.DONE
    before, wanted = await store.schema_version()
    if missing and not check:
        await store.migrate()
        found, _ = await store.schema_version()
    else:
        found = before
    up_to_date = found >= wanted
    where = context.shown_store
    if context.json:
        print_json({"store": where, "before": before, "found": found, "wanted": wanted, "up_to_date": up_to_date})
    elif up_to_date:
        click.echo(f"{where}: {_words(before, found)}")
    else:
        there = f"its schema is version {found}" if found else "there is no schema"
        click.echo(f"{where}: {there}, this bide works with version {wanted}; run `bide migrate`")
    return Exit.DONE if up_to_date else Exit.NOT_DONE


def _words(before: int, found: int) -> str:
    if before == found:
        return f"up to date, at version {found}"
    return f"the schema was made, at version {found}" if before == 0 else f"brought from version {before} to {found}"


def _print(missing: list[str], *, as_json: bool) -> None:
    """As a script that runs in one transaction, or not at all."""
    if as_json:
        print_json({"statements": missing})
    elif missing:
        click.echo(";\n\n".join(["BEGIN", *missing, "COMMIT"]) + ";")
    else:
        click.echo("-- up to date: nothing to run")


def _by_itself(context: Context) -> Exit:
    """Nothing was opened, and nothing made."""
    where = context.shown_store
    if context.json:
        print_json({"store": where, "before": None, "found": None, "wanted": None, "up_to_date": True})
    else:
        click.echo(f"{where}: makes what it needs when it is opened, and brings it up to date; nothing to be done here")
    return Exit.DONE
