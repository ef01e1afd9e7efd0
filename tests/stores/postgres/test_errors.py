"""What the server reports becomes what a caller can act on, and says what to do."""

from __future__ import annotations

import asyncpg
import pytest
from tests.stores.postgres.conftest import OpensStore

from bide.core.errors import BadInput, StoreCorrupt, StoreFull, StoreMismatch, StoreUnavailable
from bide.core.records import In
from bide.stores.postgres.errors import Again, Lost, NotSent, meaning
from bide.testing.store_suite.acts import NOW, new, put_one, retry, see, settle, take


def reported(code: str) -> asyncpg.PostgresError:
    error = asyncpg.PostgresError.new({"C": code, "M": "it says"})
    assert isinstance(error, asyncpg.PostgresError)
    return error


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        ("40001", Again, ""),
        ("40P01", Again, ""),
        ("25006", NotSent, ""),
        ("57P03", NotSent, ""),
        ("57P01", Lost, ""),
        ("53100", StoreUnavailable, "free some of its disk"),
        ("XX001", StoreCorrupt, "restore a backup"),
        ("42P01", StoreMismatch, "bide migrate"),
        ("42703", StoreMismatch, "bide migrate"),
        ("42501", StoreUnavailable, "grant"),
        ("28P01", StoreUnavailable, "password"),
        ("3D000", StoreUnavailable, "create the database"),
        ("26000", StoreUnavailable, "pooler=transaction"),
        ("XX000", StoreUnavailable, "it says"),
    ],
)
def test_each_code_has_its_meaning(code: str, kind: type[Exception], said: str) -> None:
    found = meaning(reported(code), "db")
    assert type(found) is kind
    assert said in str(found)


def test_only_new_work_meets_a_full_store() -> None:
    assert type(meaning(reported("53100"), "db", adding=True)) is StoreFull


def test_what_is_ours_comes_back_as_it_is() -> None:
    for error in (KeyError("a defect"), BadInput("a", 1, "b"), Lost("x")):
        assert meaning(error, "db") is error
    assert type(meaning(ConnectionResetError(), "db")) is Lost
    assert type(meaning(TimeoutError(), "db")) is Lost


async def test_an_error_of_any_text_can_be_kept(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    await put_one(store)
    for error, kept in (("a\0b", "a\\x00b"), ("\ud800", "\\ud800"), ("日本", "日本")):
        held = await take(store)
        assert await settle(store, retry(held, In(0), error=error))
        assert (await see(store, held)).error == kept


async def test_text_that_cannot_be_kept_is_refused_and_the_store_goes_on(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    for key in ("a\0b", "\ud800"):
        with pytest.raises(BadInput):
            await store.add([new(key)], now=NOW)
    await put_one(store)
