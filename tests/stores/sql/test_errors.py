"""What a server reports becomes what a caller can act on, and says what to do; text of any kind is kept or refused."""

from __future__ import annotations

from types import ModuleType

import asyncpg
import pytest
from asyncmy.errors import OperationalError
from tests.stores.sql.database import Database
from tests.stores.sql.fixtures import OpensStore

from bide.core.errors import BadInput, StoreCorrupt, StoreFull, StoreMismatch, StoreUnavailable
from bide.core.instants import In
from bide.core.records import Ref
from bide.stores.mysql import connection as mysql
from bide.stores.postgres import connection as postgres
from bide.stores.sql import dialect as kinds
from bide.testing.store_suite.base import add_all, keys, lease, new, put_one, retry, see, settle, take


def reported(code: str) -> asyncpg.PostgresError:
    error = asyncpg.PostgresError.new({"C": code, "M": "it says"})
    assert isinstance(error, asyncpg.PostgresError)
    return error


def meaning(error: Exception, *, adding: bool = False) -> Exception:
    if isinstance(error, OperationalError):
        return mysql.meaning(error, "db", adding=adding)
    return postgres.meaning(error, "db", adding=adding)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (reported("40001"), kinds.TransactionConflict, ""),
        (reported("40P01"), kinds.TransactionConflict, ""),
        (reported("25006"), kinds.NotSent, ""),
        (reported("57P03"), kinds.NotSent, ""),
        (reported("57P01"), kinds.Lost, ""),
        (reported("53100"), StoreUnavailable, "free some of its disk"),
        (reported("XX001"), StoreCorrupt, "restore a backup"),
        (reported("42P01"), StoreMismatch, "bide migrate"),
        (reported("42703"), StoreMismatch, "bide migrate"),
        (reported("42501"), StoreUnavailable, "grant"),
        (reported("28P01"), StoreUnavailable, "password"),
        (reported("3D000"), StoreUnavailable, "create the database"),
        (reported("26000"), StoreUnavailable, "pooler=transaction"),
        (reported("XX000"), StoreUnavailable, "it says"),
        (OperationalError(1213, "it says"), kinds.TransactionConflict, ""),
        (OperationalError(1205, "it says"), kinds.LockTimeout, ""),
        (OperationalError(1290, "it says"), kinds.NotSent, ""),
        (OperationalError(1792, "it says"), kinds.NotSent, ""),
        (OperationalError(1040, "it says"), kinds.NotSent, ""),
        (OperationalError(2003, "it says"), kinds.NotSent, ""),
        (OperationalError(2006, "it says"), kinds.Lost, ""),
        (OperationalError(2013, "it says"), kinds.Lost, ""),
        (OperationalError(1242, "it says"), kinds.AlreadyApplied, ""),
        (OperationalError(1062, "it says"), kinds.KeyTaken, ""),
        (OperationalError(1690, "it says"), kinds.RowsMissing, ""),
        (OperationalError(1114, "it says"), StoreUnavailable, "free some of its disk"),
        (OperationalError(1034, "it says"), StoreCorrupt, "restore a backup"),
        (OperationalError(1146, "it says"), StoreMismatch, "bide migrate"),
        (OperationalError(1054, "it says"), StoreMismatch, "bide migrate"),
        (OperationalError(1142, "it says"), StoreUnavailable, "grant"),
        (OperationalError(1045, "it says"), StoreUnavailable, "password"),
        (OperationalError(1665, "it says"), StoreUnavailable, "binlog_format"),
        (OperationalError(1406, "it says"), BadInput, "255 bytes"),
        (OperationalError(1105, "it says"), StoreUnavailable, "it says"),
    ],
    ids=lambda one: one.__name__ if isinstance(one, type) else str(getattr(one, "sqlstate", None) or one),
)
def test_each_error_has_its_meaning(error: Exception, kind: type[Exception], said: str) -> None:
    found = meaning(error)
    assert type(found) is kind
    assert said in str(found)


@pytest.mark.parametrize("error", [reported("53100"), OperationalError(1021, "full"), OperationalError(1114, "full")])
def test_only_new_work_meets_a_full_store(error: Exception) -> None:
    assert type(meaning(error, adding=True)) is StoreFull


@pytest.mark.parametrize("errors", [postgres, mysql])
def test_what_is_ours_comes_back_as_it_is(errors: ModuleType) -> None:
    for error in (KeyError("a defect"), BadInput("a", 1, "b"), kinds.Lost("x")):
        assert errors.meaning(error, "db") is error
    for cut in (ConnectionResetError(), TimeoutError()):
        assert type(errors.meaning(cut, "db")) is kinds.Lost
    assert type(mysql.meaning(mysql.ProtocolError("cut in the middle"), "db")) is kinds.Lost


KEPT = (("a\0b", "a\\x00b"), ("\ud800", "\\ud800"), ("日本 'it\\'s'", "日本 'it\\'s'"))


async def test_an_error_of_any_text_can_be_kept(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    await put_one(store)
    for error, kept in KEPT:
        held = await take(store)
        assert await settle(store, retry(held, In(0), error=error))
        assert (await see(store, held)).error == kept


async def test_text_that_cannot_be_kept_is_refused_and_the_store_goes_on(
    database: Database, url: str, open_store: OpensStore
) -> None:
    store = await open_store(url)
    for key in {"postgres": ("a\0b", "\ud800"), "mysql": ("a\0b", "\ud800", "x" * 201)}[database.name]:
        with pytest.raises(BadInput):
            await add_all(store, [new(key)])
    await put_one(store)


@pytest.mark.parametrize("key", ["a ", "A", "ä", "a\u0308", "ａ", "'", '"', "\\", "\\'", "a;b", "%s", ":key", "`"])
async def test_names_are_one_only_if_every_byte_is(key: str, url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    await put_one(store, new("a"))
    record = await put_one(store, new(key, topic="a ", group="g "))
    await put_one(store, new(key, group="g"))
    assert await store.get([Ref("a ", key), Ref("a", key), Ref("t", "a")]) == [
        record,
        None,
        await see(store, Ref("t", "a")),
    ]
    assert keys((await lease(store, 5, topic="a ")).tasks) == [key]
