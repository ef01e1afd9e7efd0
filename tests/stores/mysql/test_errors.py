"""What the server reports becomes what a caller can act on, and says what to do."""

from __future__ import annotations

import pytest
from asyncmy.errors import OperationalError
from tests.stores.mysql.conftest import OpensStore

from bide.core.errors import BadInput, StoreCorrupt, StoreFull, StoreMismatch, StoreUnavailable
from bide.core.records import In, Ref
from bide.stores.mysql.errors import Again, Broken, Fewer, Locked, Lost, NotSent, Shut, Taken, meaning
from bide.testing.store_suite.acts import NOW, keys, lease, new, put_one, retry, see, settle, take


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (1213, Again, ""),
        (1205, Locked, ""),
        (1290, NotSent, ""),
        (1792, NotSent, ""),
        (1040, NotSent, ""),
        (2003, NotSent, ""),
        (2006, Lost, ""),
        (2013, Lost, ""),
        (1242, Shut, ""),
        (1062, Taken, ""),
        (1690, Fewer, ""),
        (1114, StoreUnavailable, "free some of its disk"),
        (1034, StoreCorrupt, "restore a backup"),
        (1146, StoreMismatch, "bide migrate"),
        (1054, StoreMismatch, "bide migrate"),
        (1142, StoreUnavailable, "grant"),
        (1045, StoreUnavailable, "password"),
        (1665, StoreUnavailable, "binlog_format"),
        (1406, BadInput, "255 bytes"),
        (1105, StoreUnavailable, "it says"),
    ],
)
def test_each_number_has_its_meaning(code: int, kind: type[Exception], said: str) -> None:
    found = meaning(OperationalError(code, "it says"), "db")
    assert type(found) is kind
    assert said in str(found)


@pytest.mark.parametrize("code", [1021, 1114])
def test_only_new_work_meets_a_full_store(code: int) -> None:
    assert type(meaning(OperationalError(code, "full"), "db", adding=True)) is StoreFull


def test_what_is_ours_comes_back_as_it_is() -> None:
    for error in (KeyError("a defect"), BadInput("a", 1, "b"), Lost("x")):
        assert meaning(error, "db") is error
    for cut in (ConnectionResetError(), TimeoutError(), Broken("cut in the middle")):
        assert type(meaning(cut, "db")) is Lost


async def test_an_error_of_any_text_can_be_kept(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    await put_one(store)
    for error, kept in (("a\0b", "a\0b"), ("\ud800", "\\ud800"), ("日本 'it\\'s'", "日本 'it\\'s'")):
        held = await take(store)
        assert await settle(store, retry(held, In(0), error=error))
        assert (await see(store, held)).error == kept


async def test_text_that_cannot_be_kept_is_refused_and_the_store_goes_on(url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    for key in ("a\0b", "\ud800", "x" * 201):
        with pytest.raises(BadInput):
            await store.add([new(key)], now=NOW)
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


@pytest.mark.parametrize("payload", [b"\\", b"'", b"\\'", b"\0\x1a\n\r", bytes(range(256)), b"'" * 1_000])
async def test_every_byte_of_a_payload_comes_back(payload: bytes, url: str, open_store: OpensStore) -> None:
    store = await open_store(url)
    await put_one(store, new(payload=payload, options=payload))
    held = await take(store)
    assert (held.payload, held.options) == (payload, payload)
