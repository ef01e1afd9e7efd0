"""`bide migrate`: create or upgrade the schema in a database, or say what that would take."""

from __future__ import annotations

import asyncio

import click

from bide.cli.context import Context, shared_options
from bide.cli.exits import Exit
from bide.core.errors import BadInput
from bide.ports import HasSchema
from bide.wiring import store_maker


@click.command()
@click.option("--check", is_flag=True, help="Only say whether the schema is up to date: exit code 0 if so, else 1.")
@click.option("--print", "as_sql", is_flag=True, help="Print the missing statements, and run none of them.")
@shared_options()
@click.pass_obj
def migrate(context: Context, check: bool, as_sql: bool) -> Exit:
    """Create or upgrade the schema in a database. Any number of processes may do so at once.

    A migration is compatible with older versions, which may go on meanwhile. It needs more privileges than the rest of
    bide: docs/sql.md lists them. A SQLite file and Redis need no migration.
    """
    if check and as_sql:
        raise BadInput("--check", "together with --print", "one of the two")
    settings = context.settings()
    schema = store_maker(settings.store, settings)().features.schema
    if schema is None:
        return _by_itself(context)
    return asyncio.run(_migrate(context, schema, check=check, as_sql=as_sql))


async def _migrate(context: Context, schema: HasSchema, *, check: bool, as_sql: bool) -> Exit:
    missing = await schema.plan()
    if missing is None:
        return _by_itself(context)
    if as_sql:
        script = ";\n\n".join(["BEGIN", *missing, "COMMIT"]) + ";"  # runs in one transaction, or not at all
        context.say({"statements": missing}, script if missing else "-- up to date: nothing to run")
        return Exit.DONE
    before, wanted = await schema.schema_version()
    if missing and not check:
        await schema.migrate()
        found, _ = await schema.schema_version()
    else:
        found = before
    up_to_date = found >= wanted
    where = context.shown_store
    words = _words(before, found)
    if not up_to_date:
        there = f"its schema is version {found}" if found else "there is no schema"
        words = f"{there}, this bide works with version {wanted}; run `bide migrate`"
    shape = {"store": where, "before": before, "found": found, "wanted": wanted, "up_to_date": up_to_date}
    context.say(shape, f"{where}: {words}")
    return Exit.DONE if up_to_date else Exit.NOT_DONE


def _words(before: int, found: int) -> str:
    if before == found:
        return f"up to date, at version {found}"
    return f"the schema was made, at version {found}" if before == 0 else f"brought from version {before} to {found}"


def _by_itself(context: Context) -> Exit:
    """Report that the store migrates itself when it is opened."""
    where = context.shown_store
    context.say(
        {"store": where, "before": None, "found": None, "wanted": None, "up_to_date": True},
        f"{where}: creates and upgrades its schema when it is opened; nothing to do",
    )
    return Exit.DONE
