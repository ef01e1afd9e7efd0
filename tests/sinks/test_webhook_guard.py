"""What may be called: each way to write an address that must not be, as a URL and as what a name resolved to."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import urlsplit

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from yarl import URL

from bide import BadInput
from bide.sinks.webhook.guard import AddressRefused, Guard, blocked_reason, ip_literal

GUARD = Guard()

BAD_URLS: dict[str, str] = {
    "loopback": "https://127.0.0.1/",
    "all of loopback": "https://127.255.255.254/",
    "this host": "https://0.0.0.0/",
    "this network": "https://0.1.2.3/",
    "private 10": "https://10.0.0.5/",
    "private 172": "https://172.31.255.255/",
    "private 192": "https://192.168.0.1:8443/",
    "link-local": "https://169.254.169.254/latest/meta-data/",
    "carrier's NAT": "https://100.100.100.200/",
    "benchmarking": "https://198.19.0.1/",
    "documentation": "https://203.0.113.7/",
    "protocols": "https://192.0.0.192/",
    "6to4 relay": "https://192.88.99.1/",
    "multicast": "https://224.0.0.1/",
    "reserved": "https://240.0.0.1/",
    "broadcast": "https://255.255.255.255/",
    "Azure's host": "https://168.63.129.16/",
    "three parts": "https://127.0.1/",
    "mixed parts": "https://0x7f.1/",
    "leading zeros": "https://127.000.000.001/",
    "a public one as a number": "https://134744072/",
    "no address, but a number": "https://999.1.1.1/",
    "too large a number": "https://4294967296/",
    "loopback in IPv6": "https://[::1]/",
    "unspecified in IPv6": "https://[::]/",
    "IPv4-mapped, in full": "https://[0:0:0:0:0:ffff:a9fe:a9fe]/",
    "IPv4-mapped, public": "https://[::ffff:8.8.8.8]/",
    "NAT64 of this network": "https://[64:ff9b:1::1]/",
    "unique local": "https://[fd00:ec2::254]/",
    "link-local in IPv6": "https://[fe80::1]/",
    "link-local with its link": "https://[fe80::1%25eth0]/",
    "site-local": "https://[fec0::1]/",
    "multicast in IPv6": "https://[ff02::1]/",
    "documentation in IPv6": "https://[2001:db8::1]/",
    "newer documentation in IPv6": "https://[3fff::1]/",
    "not yet given out": "https://[4000::1]/",
    "localhost": "https://localhost/",
    "localhost, shouted": "https://LOCALHOST/",
    "localhost with a dot": "https://localhost./",
    "below localhost": "https://a.b.localhost/",
    "plain http": "http://hooks.example.com/",
    "a user": "https://user@hooks.example.com/",
    "a password": "https://user:hunter2@hooks.example.com/",
    "a host that is a user": "https://hooks.example.com@127.0.0.1/",
    "a backslash before it": "https://hooks.example.com\\@127.0.0.1/",
    "a fragment": "https://hooks.example.com/#here",
    "port 0": "https://hooks.example.com:0/",
    "port 65536": "https://hooks.example.com:65536/",
    "a file": "file:///etc/passwd",
    "gopher": "gopher://127.0.0.1:6379/_FLUSHALL",
    "ftp": "ftp://hooks.example.com/",
    "a unix socket": "http+unix://%2Frun%2Fdocker.sock/",
    "no scheme": "hooks.example.com/a",
    "no host": "https:///a",
    "a relative URL": "//hooks.example.com/a",
    "empty": "",
    "a space before": " https://hooks.example.com/",
    "a line end within": "https://hooks.example.com/\r\nHost: evil",
    "a tab in the host": "https://127\t.0.0.1/",
    "a NUL": "https://hooks.example.com/\x00",
    "digits in circles": "https://①②⑦.⓪.⓪.①/",
    "digits of full width": "https://１２７.0.0.1/",
    "dots of full width": "https://127。0。0。1/",
    "a name not in ASCII": "https://bücher.example/",
    "a percent in the host": "https://%31%32%37.0.0.1/",
    "two dots": "https://localhost../",
    "too long": "https://hooks.example.com/" + "a" * 2_048,
}

GOOD_URLS = (
    "https://hooks.example.com/a/b?c=d&e=%2F",
    "https://hooks.example.com",
    "https://hooks.example.com?x=1@2",
    "https://HOOKS.example.com:8443/",
    "https://xn--bcher-kva.example/",
    "https://8.8.8.8/",
    "https://[2606:4700:4700::1111]/",
    "https://[64:ff9b::8.8.8.8]/",
    "https://3com.example/",
    "https://0x7f.example/",
    "https://under_score.example/",
)


@pytest.mark.parametrize("url", BAD_URLS.values(), ids=BAD_URLS)
def test_a_url_that_must_not_be_called(url: str) -> None:
    with pytest.raises(BadInput, match=r"url: .* is not accepted; give "):
        GUARD.target(url)


@pytest.mark.parametrize("url", GOOD_URLS)
def test_a_url_that_may(url: str) -> None:
    assert GUARD.target(url).url == url


def test_what_is_no_text_is_no_url() -> None:
    for url in (None, 42, b"https://hooks.example.com/"):
        with pytest.raises(BadInput):
            GUARD.target(url)


def test_an_error_shows_no_password_and_no_path() -> None:
    for url in (BAD_URLS["a password"], "https://user:hunter2@10.0.0.1/", "user:hunter2@host", "http://h/hunter2"):
        with pytest.raises(BadInput) as caught:
            GUARD.target(url)
        assert "hunter2" not in f"{caught.value!s} {caught.value!r}"


# --- the table of addresses

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
V4 = st.one_of(st.ip_addresses(v=4), st.sampled_from(["10.0.0.0", "127.0.0.1", "169.254.169.254"]).map(IPv4Address))
V6 = st.one_of(st.ip_addresses(v=6), V4.map(lambda address: NAT64[int(address)]))


def not_public(address: IPv4Address | IPv6Address) -> bool:
    """By the standard library, whatever its version knows; NAT64 leads to the IPv4 address within."""
    if address in NAT64:
        address = IPv4Address(int(address) & 0xFFFFFFFF)
    return (
        not address.is_global
        or address.is_multicast
        or address.is_reserved
        or address.is_link_local
        or address.is_loopback
        or address.is_unspecified
        or address.is_private
    )


def octal(address: IPv4Address) -> str:
    return ".".join(f"0{part:o}" for part in address.packed)


def hexadecimal(address: IPv4Address) -> str:
    return ".".join(f"0x{part:X}" for part in address.packed)


def short(address: IPv4Address) -> str:
    return f"{address.packed[0]}.{int(address) & 0xFFFFFF}"


NOTATIONS: dict[str, Callable[[IPv4Address], str]] = {
    "dotted": str,
    "with a dot at the end": lambda address: f"{address}.",
    "decimal": lambda address: str(int(address)),
    "octal": octal,
    "one octal": lambda address: f"0{int(address):o}",
    "hexadecimal": hexadecimal,
    "one hexadecimal": lambda address: f"0x{int(address):x}",
    "two parts": short,
    "IPv4-mapped": lambda address: f"[::ffff:{address}]",
    "IPv4-mapped in hexadecimal": lambda address: f"[{IPv6Address(0xFFFF_0000_0000 + int(address))}]",
    "IPv4-compatible": lambda address: f"[::{address}]",
    "6to4": lambda address: f"[{IPv6Address((0x2002 << 112) + (int(address) << 80))}]",
    "NAT64": lambda address: f"[64:ff9b::{address}]",
    "Teredo": lambda address: f"[{IPv6Address((0x20010000 << 96) + (int(address) ^ 0xFFFFFFFF))}]",
}


@pytest.mark.parametrize("notation", NOTATIONS)
@settings(max_examples=30)
@given(address=V4)
def test_no_ipv4_address_that_is_not_public_is_called_in_any_notation(notation: str, address: IPv4Address) -> None:
    assume(not_public(address))
    with pytest.raises(BadInput):
        GUARD.target(f"https://{NOTATIONS[notation](address)}/")


@given(address=V4)
def test_no_connection_to_an_ipv4_address_that_is_not_public(address: IPv4Address) -> None:
    refused = GUARD.refusal(str(address))
    assert refused or not not_public(address)
    for within in ("IPv4-mapped", "IPv4-compatible", "6to4", "NAT64", "Teredo"):
        inner = NOTATIONS[within](address).strip("[]")
        if refused or within != "NAT64":
            assert GUARD.refusal(inner), inner


@given(address=V6)
def test_no_connection_to_an_ipv6_address_that_is_not_public(address: IPv6Address) -> None:
    refused = GUARD.refusal(str(address))
    assert refused or not not_public(address)
    assert bool(refused) is bool(GUARD.refusal(address.exploded))
    if refused:
        for text in (str(address), address.exploded, str(address).upper()):
            with pytest.raises(BadInput):
                GUARD.target(f"https://[{text}]/")


@given(rest=st.integers(0, 2**125 - 1))
def test_no_connection_to_a_public_looking_ipv6_address_of_a_special_range(rest: int) -> None:
    for network in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "fc00::/7", "fe80::/10", "ff00::/8"):
        base = ipaddress.IPv6Network(network)
        address = base[rest % base.num_addresses]
        assert blocked_reason(address)


@given(host=st.text("0123456789abcdefxX.", min_size=1, max_size=20))
def test_what_the_c_library_reads_as_an_address_is_never_taken_for_a_name(host: str) -> None:
    try:
        meant = IPv4Address(socket.inet_aton(host))
    except OSError:
        return
    if ip_literal(host) is None:
        with pytest.raises(BadInput):
            GUARD.target(f"https://{host}/")
    else:
        assert ip_literal(host) == meant


@pytest.mark.parametrize("name", ["hooks.example.com", "3com", "0x7g", "a.b.0xyz", "1e5", "xn--0", "deadbeef"])
def test_a_name_is_no_number(name: str) -> None:
    assert GUARD.target(f"https://{name}/").host == f"{name}:443"


AUTHORITIES = st.one_of(
    st.from_regex(r"[A-Za-z0-9._-]{1,30}(:[0-9]{1,5})?", fullmatch=True),
    st.from_regex(r"\[[0-9a-f:.]{2,30}\](:[0-9]{1,5})?", fullmatch=True),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
    st.text("abc.:@\\/?#[]%01", max_size=20),
)
RESTS = st.text("abc/?#@:\\.%0[]&= \t\r\n;\u3002", max_size=20)
URLS = st.one_of(
    st.text(max_size=60),
    st.builds("{}://{}{}".format, st.sampled_from(["https", "http", "HTTPS", "ftp"]), AUTHORITIES, RESTS),
    st.builds("{}://{}/{}".format, st.sampled_from(["https", "http"]), AUTHORITIES, RESTS),
)


@settings(max_examples=200)
@given(url=URLS)
def test_no_two_parsers_read_a_url_that_passed_as_leading_to_two_hosts(url: str) -> None:
    """Ours, that of aiohttp, which makes the request, and that of the standard library."""
    try:
        target = Guard(["2000::/3"], plain_http=True).target(url)
    except BadInput:
        return
    sent, standard = URL(url), urlsplit(url)
    for host, port in ((sent.raw_host, sent.port), (standard.hostname, standard.port or sent.port)):
        assert host is not None
        address = ip_literal(host)
        name = f"[{address}]" if address is not None and address.version == 6 else host.removesuffix(".")
        assert f"{name}:{port}" == target.host
    assert sent.user is None
    assert sent.password is None
    assert not sent.fragment


# --- what is allowed


def test_an_allowed_network() -> None:
    guard = Guard(["10.1.0.0/16", "fd00::/8", "127.0.0.1"])
    for host in ("10.1.2.3", "[fd00::1]", "127.0.0.1"):
        assert guard.target(f"http://{host}:8080/").trusted is False
        assert guard.refusal(host.strip("[]")) is None
    for host in ("10.2.0.1", "[fe80::1]", "127.0.0.2", "[::ffff:10.1.2.3]", "0x0a010203"):
        with pytest.raises(BadInput):
            guard.target(f"https://{host}/")
    with pytest.raises(BadInput, match="https"):
        guard.target("http://inside.example/")


def test_an_allowed_host_is_one_with_its_port() -> None:
    guard = Guard(["Receiver.internal:8080", "[0:0::1]:9000", "localhost:443"])
    for url in ("http://receiver.internal:8080/a", "https://RECEIVER.internal.:8080", "http://[::1]:9000/"):
        assert guard.target(url).trusted
    assert guard.target("https://localhost/").trusted
    for url in ("http://receiver.internal/", "https://[::1]/", "https://localhost:8443/", "http://localhost/"):
        with pytest.raises(BadInput):
            guard.target(url)


def test_plain_http_may_be_allowed_to_all_public_hosts() -> None:
    guard = Guard(plain_http=True)
    assert guard.target("http://hooks.example.com/").host == "hooks.example.com:80"
    with pytest.raises(BadInput, match="loopback"):
        guard.target("http://127.0.0.1/")


@pytest.mark.parametrize(
    "entry", ["receiver.internal", "10.1.2.3/8", "*", "*.internal:80", "host:0", "host:99999", "http://h:1", "", 42]
)
def test_an_entry_that_would_allow_something_else_than_was_meant(entry: object) -> None:
    with pytest.raises(BadInput, match=r"allow\[1\].*a network such as"):
        Guard(["10.0.0.0/8", entry])  # type: ignore[list-item]


def test_the_list_is_a_list() -> None:
    with pytest.raises(BadInput, match="a list"):
        Guard("10.0.0.0/8")


# --- the socket


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "169.254.169.254", "fe80::1%eth0", "2130706433", "localhost"]
)
def test_no_socket_is_made_for_an_address_that_must_not_be_connected_to(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with pytest.raises(AddressRefused):
        GUARD.socket((family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, 443)))


def test_a_socket_is_made_for_a_public_one() -> None:
    with GUARD.socket((socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("8.8.8.8", 443))) as made:
        assert made.family == socket.AF_INET
