"""What a store URL says."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from bide.core.errors import BadInput
from bide.stores.mysql.connection import Address, address_of


def test_every_part_is_read() -> None:
    assert address_of("mysql://u:p%40@db:3307,[::1]/shop?schema=tasks&prefix=a_&ssl_mode=required") == Address(
        hosts=(("db", 3307), ("::1", 3306)),
        user="u",
        password="p@",
        database="shop",
        schema="tasks",
        prefix="a_",
        options={"ssl_mode": "required"},
        shown="db:3307,[::1]/tasks a_*",
    )
    plain = address_of("mariadb:///shop?socket=/run/mysqld/mysqld.sock")
    assert (plain.schema, plain.prefix, plain.socket) == ("shop", "bide_", "/run/mysqld/mysqld.sock")
    assert address_of("mysql://h?schema=tasks").database == ""


@pytest.mark.parametrize(
    ("url", "field"),
    [
        ("postgresql://h/d", "store"),
        ("mysql://h/d#x", "store"),
        ("mysql://h", "store"),
        ("mysql://h:x/d", "store"),
        ("mysql://h:0/d", "store"),
        ("mysql://h/a`b", "store"),
        ("mysql://h/d?schema=a.b", "schema"),
        ("mysql://h/d?schema=", "schema"),
        ("mysql://h/d?prefix=1", "prefix"),
        ("mysql://h/d?prefix=", "prefix"),
        ("mysql://h/d?prefix=a-b", "prefix"),
        ("mysql://h/d?charset=utf8", "store"),
        ("mysql://h/d?ssl_mode=maybe", "ssl_mode"),
        ("mysql://h/d?ssl_mode=disabled&ssl_ca=/a", "ssl_mode"),
    ],
)
def test_what_cannot_be_is_refused(url: str, field: str) -> None:
    with pytest.raises(BadInput) as refused:
        address_of(url)
    assert refused.value.field == field


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(BadInput, match=r"charset=.*prefix, schema, socket, ssl_ca"):
        address_of("mysql://h/d?charset=utf8")


def test_no_password_is_shown() -> None:
    assert "hunter2" not in address_of("mysql://u:hunter2@db/shop").shown
    with pytest.raises(BadInput) as refused:
        address_of("mysql://u:hunter2@db/shop?prefix=X")
    assert "hunter2" not in str(refused.value)


def test_how_a_connection_is_encrypted(tmp_path: Path) -> None:
    assert address_of("mysql://h/d").tls() is None
    required = address_of("mysql://h/d?ssl_mode=required").tls()
    assert (required.verify_mode, required.check_hostname) == (ssl.CERT_NONE, False)
    checked = address_of("mysql://h/d?ssl_mode=verify_identity").tls()
    assert (checked.verify_mode, checked.check_hostname) == (ssl.CERT_REQUIRED, True)
    with pytest.raises(BadInput, match="can be read"):
        address_of(f"mysql://h/d?ssl_ca={tmp_path}/none.pem").tls()
