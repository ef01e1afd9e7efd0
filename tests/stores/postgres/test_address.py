"""What a store URL says."""

from __future__ import annotations

import pytest

from bide.core.errors import BadInput
from bide.stores.postgres.connection import Address, address_of


def test_what_is_ours_is_taken_out_and_the_rest_is_the_drivers() -> None:
    assert address_of("postgres://u:p%40@db:5433/shop?schema=tasks&prefix=a_&sslmode=require") == Address(
        dsn="postgresql://u:p%40@db:5433/shop?sslmode=require",
        schema="tasks",
        prefix="a_",
        shown="db:5433/shop tasks.a_*",
    )
    plain = address_of("postgresql:///shop")
    assert (plain.dsn, plain.schema, plain.prefix, plain.pooled) == ("postgresql:///shop", "bide", "", False)
    assert address_of("postgresql://h/d?pooler=transaction").pooled


@pytest.mark.parametrize(
    "url",
    [
        "mysql://h/d",
        "postgresql://h/d#x",
        "postgresql://h/d?schema=A",
        "postgresql://h/d?schema=",
        "postgresql://h/d?schema=pg_x",
        "postgresql://h/d?schema=a.b",
        'postgresql://h/d?schema=a"',
        "postgresql://h/d?prefix=1",
        "postgresql://h/d?prefix=a-b",
        "postgresql://h/d?pooler=statement",
    ],
)
def test_what_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(BadInput):
        address_of(url)


def test_no_password_is_shown() -> None:
    address = address_of("postgresql://u:hunter2@db/shop")
    assert "hunter2" not in address.shown
    with pytest.raises(BadInput) as refused:
        address_of("postgresql://u:hunter2@db/shop?schema=X")
    assert "hunter2" not in str(refused.value)
