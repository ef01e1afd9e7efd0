"""URLs that fuzzing found to end in another error than one that says what is wrong, or to show a password."""

from __future__ import annotations

import pytest

from bide.core.errors import BadInput
from bide.settings import Settings
from bide.sinks.webhook.guard import Guard
from bide.stores.mysql import MySqlStore
from bide.stores.postgres import PostgresStore
from bide.stores.redis import RedisStore
from bide.wiring import store_maker


@pytest.mark.parametrize(
    "url",
    [
        "redis://[::1", "redis://[.x]/0", "sqlite://[x", "http://[", "mysql://[::1/db", "postgresql://h]/db",
        "redis://h:0/0", "redis://h:65536", "redis+cluster://h:6379,h:99999", "mysql://h:²/db", "mysql://h:1_0/db",
        "postgresql://h:x/db", "postgresql://h:0/db", "postgresql://h,/db", "postgresql://h:99999/db",
    ],
)  # fmt: skip
def test_what_is_no_url_of_a_store_is_said_to_be_none(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        store_maker(url, Settings())
    assert caught.value.field == "store"


@pytest.mark.parametrize("store", [RedisStore, MySqlStore, PostgresStore])
def test_a_store_says_so_by_itself(store: type[RedisStore | MySqlStore | PostgresStore]) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        store("redis://[::1")


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "postgresql", "mysql"])
@pytest.mark.parametrize("password", ["s3cret/x", "s3cret?x", "s3cret#x"])
def test_a_password_that_is_not_percent_encoded_is_not_shown(scheme: str, password: str) -> None:
    with pytest.raises(BadInput) as caught:
        store_maker(f"{scheme}://user:{password}@host/0", Settings())
    assert "s3cret" not in str(caught.value)
    assert "%2F" in caught.value.accepted


async def test_a_port_in_the_options_that_is_none_is_the_urls_fault() -> None:
    store = PostgresStore("postgresql:///db?host=h&port=x")
    with pytest.raises(BadInput, match="a URL that the driver can read"):
        await store.open()


@pytest.mark.parametrize("url", ["https://user:s3cret/x@host/", "x//user:s3cret@host://y"])
def test_a_password_in_the_url_of_a_webhook_is_not_shown(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        Guard().target(url)
    assert "s3cret" not in str(caught.value)
