"""Store URLs of Redis: what they say, and what is refused, without ever showing a password."""

from __future__ import annotations

import pytest

from bide import BadInput
from bide.stores.redis.address import Address, address_of


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://localhost", Address(kind="single", hosts=(("localhost", 6379),))),
        ("redis://h:7000/3", Address(kind="single", hosts=(("h", 7000),), db=3)),
        ("redis://u:p%40ss@h", Address(kind="single", hosts=(("h", 6379),), username="u", password="p@ss")),
        ("redis://:secret@h", Address(kind="single", hosts=(("h", 6379),), password="secret")),
        ("rediss://[::1]:1", Address(kind="single", hosts=(("::1", 1),), tls=True)),
        ("unix:///run/r.sock?db=2", Address(kind="single", path="/run/r.sock", db=2)),
        ("unix://u:p@/run/r.sock", Address(kind="single", path="/run/r.sock", username="u", password="p")),
        (
            "redis+sentinel://a,b:2/main/1?sentinel_password=s",
            Address(kind="sentinel", hosts=(("a", 26379), ("b", 2)), service="main", db=1, sentinel_password="s"),
        ),
        (
            "rediss://h?ssl_ca_certs=/ca.pem&ssl_check_hostname=0",
            Address(
                kind="single",
                hosts=(("h", 6379),),
                tls=True,
                tls_options={"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False},
            ),
        ),
        ("redis+cluster://a:1,b:2?tls=1", Address(kind="cluster", hosts=(("a", 1), ("b", 2)), tls=True)),
        (
            "redis://h?namespace=shop&shards=4&wait_replicas=2",
            Address(kind="single", hosts=(("h", 6379),), namespace="shop", shards=4, wait_replicas=2),
        ),
    ],
)
def test_a_url_says_where_and_how(url: str, expected: Address) -> None:
    assert address_of(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "redis://a,b",
        "redis://h:port",
        "redis://h:999999",
        "redis://h/zero",
        "redis://h/0/1",
        "redis://h#here",
        "redis://h?shard=3",
        "rediss://h?ssl_foo=1",
        "rediss://h?ssl_check_hostname=perhaps",
        "rediss://h?ssl_cert_reqs=maybe",
        "redis://h?shards=0",
        "redis://h?shards=many",
        "redis://h?namespace=",
        "redis://h?namespace=a{b}",
        "redis://h?wait_replicas=-1",
        "redis+sentinel://h",
        "redis+sentinel://h/main/0/1",
        "redis+cluster://h/3",
        "unix://relative.sock",
        "rediss+cluster://h",
    ],
)
def test_what_cannot_be_meant_is_refused(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        address_of(url)
    assert caught.value.accepted


@pytest.mark.parametrize("url", ["redis://u:hidden@h:port", "redis://u:hidden@h/x", "redis://u:hidden@h?shards=none"])
def test_a_password_is_never_shown(url: str) -> None:
    with pytest.raises(BadInput) as caught:
        address_of(url)
    assert "hidden" not in str(caught.value)
    assert "hidden" not in address_of("redis://u:hidden@h").shown
