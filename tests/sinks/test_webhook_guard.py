"""Where a webhook may go: the guard of addresses, names that change, and the bounds of each host."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import socket
from collections.abc import Callable, Coroutine
from functools import wraps
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.sinks.receiver import Receiver, receiving, says
from tests.sinks.test_webhook_faults import Names, why
from tests.waiting import elapse, in_virtual_time, virtual_time
from yarl import URL

from bide import BadInput, Task
from bide.sinks.webhook import WebhookPost
from bide.sinks.webhook.guard import AddressRefused, Guard, blocked_reason, ip_literal
from bide.sinks.webhook.hosts import FARTHEST, PATIENCE, HostLimits, HostSlot
from bide.testing import task_for
from bide.testing.virtual import VirtualLoop
from bide_proofs.servers.process import free_port

GUARD = Guard()

PASSWORD = "https://user:hunter2@hooks.example.com/"
BAD_URLS = [
    # addresses of this machine, and of networks that are not public
    "https://127.0.0.1/", "https://127.255.255.254/", "https://0.0.0.0/", "https://0.1.2.3/", "https://10.0.0.5/",
    "https://172.31.255.255/", "https://192.168.0.1:8443/", "https://169.254.169.254/latest/meta-data/",
    "https://100.100.100.200/",  # within the network of a carrier
    "https://198.19.0.1/", "https://203.0.113.7/", "https://192.0.0.192/",  # benchmarks, documentation, protocols
    "https://192.88.99.1/", "https://224.0.0.1/", "https://240.0.0.1/", "https://255.255.255.255/",
    "https://168.63.129.16/",  # the host of every machine at Azure
    # numbers that are addresses to some
    "https://127.0.1/", "https://0x7f.1/", "https://127.000.000.001/", "https://134744072/", "https://999.1.1.1/",
    "https://4294967296/",
    # the same in IPv6, and what leads to IPv4
    "https://[::1]/", "https://[::]/", "https://[0:0:0:0:0:ffff:a9fe:a9fe]/", "https://[::ffff:8.8.8.8]/",
    "https://[64:ff9b:1::1]/", "https://[fd00:ec2::254]/", "https://[fe80::1]/", "https://[fe80::1%25eth0]/",
    "https://[fec0::1]/", "https://[ff02::1]/", "https://[2001:db8::1]/", "https://[3fff::1]/", "https://[4000::1]/",
    # names of this machine
    "https://localhost/", "https://LOCALHOST/", "https://localhost./", "https://a.b.localhost/", "https://localhost../",
    # users, passwords, and hosts that are none
    "https://user@hooks.example.com/", PASSWORD, "https://hooks.example.com@127.0.0.1/",
    "https://hooks.example.com\\@127.0.0.1/", "https://hooks.example.com/#here",
    # ports and schemes
    "http://hooks.example.com/", "https://hooks.example.com:0/", "https://hooks.example.com:65536/",
    "file:///etc/passwd", "gopher://127.0.0.1:6379/_FLUSHALL", "ftp://hooks.example.com/",
    "http+unix://%2Frun%2Fdocker.sock/", "hooks.example.com/a", "https:///a", "//hooks.example.com/a", "",
    # characters that one parser takes and another does not
    " https://hooks.example.com/", "https://hooks.example.com/\r\nHost: evil", "https://127\t.0.0.1/",
    "https://hooks.example.com/\x00", "https://①②⑦.⓪.⓪.①/", "https://１２７.0.0.1/", "https://127。0。0。1/",
    "https://bücher.example/", "https://%31%32%37.0.0.1/",
    "https://hooks.example.com/" + "a" * 2_048,
]  # fmt: skip

GOOD_URLS = (
    "https://hooks.example.com/a/b?c=d&e=%2F", "https://hooks.example.com", "https://hooks.example.com?x=1@2",
    "https://HOOKS.example.com:8443/", "https://xn--bcher-kva.example/", "https://8.8.8.8/",
    "https://[2606:4700:4700::1111]/", "https://[64:ff9b::8.8.8.8]/", "https://3com.example/", "https://0x7f.example/",
    "https://under_score.example/",
)  # fmt: skip


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_url_that_must_not_be_called(url: str) -> None:
    with pytest.raises(BadInput, match=r"url: .* is not accepted; give "):
        GUARD.target(url)


@pytest.mark.parametrize("url", GOOD_URLS)
def test_a_url_that_may(url: str) -> None:
    assert GUARD.target(url).url.casefold() == url.casefold()


def test_what_is_no_text_is_no_url() -> None:
    for url in (None, 42, b"https://hooks.example.com/"):
        with pytest.raises(BadInput):
            GUARD.target(url)


def test_an_error_shows_no_password_and_no_path() -> None:
    for url in (PASSWORD, "https://user:hunter2@10.0.0.1/", "user:hunter2@host", "http://h/hunter2"):
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
    sent, standard = URL(target.url, encoded=True), urlsplit(url)
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


INSIDE = "127.0.0.1"
OUTSIDE = "127.0.0.2"
"""Stands for a public address: the only one that these posts are allowed to call."""


def task(url: str) -> Task[Any]:
    return task_for("order.close", {"number": 42}, key="42", headers={"webhook": url})


async def test_a_name_that_leads_inside(receiver: Receiver) -> None:
    """It may lead elsewhere next time, so the task is tried again; nothing is sent meanwhile."""
    async with WebhookPost(plain_http=True, resolver=Names([INSIDE])) as post:
        outcome = await post.sink(per_task=True).deliver(task(f"http://evil.example:{receiver.port}/"))
    assert f"refused: {INSIDE} is a loopback address" in why(outcome)
    assert receiver.connections == 0


async def test_a_name_that_is_bound_anew_between_two_deliveries() -> None:
    """DNS rebinding: outside when it was first looked at, inside when it counts."""
    async with (
        receiving(says(200, b"", "Connection: close"), host=OUTSIDE, port=free_port()) as outside,
        receiving(host=INSIDE, port=outside.port) as inside,
    ):
        names = Names([OUTSIDE], [INSIDE])
        async with WebhookPost(allow=[OUTSIDE], plain_http=True, resolver=names) as post:
            sink, url = post.sink(per_task=True), f"http://evil.example:{outside.port}/"
            assert await sink.deliver(task(url)) is None
            post.sessions[False].connector.clear_dns_cache()  # type: ignore[union-attr]  # 10 seconds later
            outcome = await sink.deliver(task(url))
        assert names.asked == 2
        assert "refused" in why(outcome)
        assert len(outside.received) == 1
        assert inside.connections == 0


async def test_a_name_with_addresses_inside_and_outside_leads_outside_alone() -> None:
    port = free_port()
    async with receiving(host=OUTSIDE, port=port) as outside, receiving(host=INSIDE, port=port) as inside:
        for order in ([INSIDE, OUTSIDE], [OUTSIDE, INSIDE]):
            async with WebhookPost(allow=[OUTSIDE], plain_http=True, resolver=Names(order)) as post:
                assert await post.sink(per_task=True).deliver(task(f"http://evil.example:{outside.port}/")) is None
        assert len(outside.received) == 2
        assert inside.connections == 0


async def test_a_name_whose_outside_does_not_answer_does_not_fall_back_to_the_inside() -> None:
    async with receiving(host=OUTSIDE, port=free_port()) as gone:
        port = gone.port
    async with receiving(host=INSIDE, port=port) as inside:
        names = Names([OUTSIDE, INSIDE])
        async with WebhookPost(allow=[OUTSIDE], plain_http=True, resolver=names) as post:
            why(await post.sink(per_task=True).deliver(task(f"http://evil.example:{port}/")))
        assert inside.connections == 0


async def test_a_redirect_inside_is_not_followed(receiver: Receiver) -> None:
    async with receiving() as inside:
        receiver.answer = says(307, b"", f"Location: {inside.url}")
        async with WebhookPost(allow=[receiver.place]) as post:
            outcome = await post.sink(receiver.url).deliver(task("unused"))
        assert f"redirects are not followed (to {inside.url})" in why(outcome)
        assert inside.connections == 0
        assert len(receiver.received) == 1


async def test_an_allowed_host_does_not_lend_its_connections_to_a_name(receiver: Receiver) -> None:
    """The connection to the allowed host is kept; a name that leads to the same place is still refused."""
    names = Names([INSIDE])
    async with WebhookPost(allow=[receiver.place], plain_http=True, resolver=names) as post:
        sink = post.sink(per_task=True)
        assert await sink.deliver(task(receiver.url)) is None
        outcome = await sink.deliver(task(f"http://evil.example:{receiver.port}/"))
    assert "refused" in why(outcome)
    assert len(receiver.received) == 1


async def test_no_proxy_of_the_environment_is_used(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy connects where the guard does not see it; nor is a password taken from a netrc file."""
    async with receiving() as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://{proxy.place}")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        async with WebhookPost(allow=[receiver.place]) as post:
            assert await post.sink(receiver.url).deliver(task("unused")) is None
        assert proxy.connections == 0
    assert "authorization" not in receiver.received[0].headers


def test_the_guard_holds_on_another_event_loop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def attack() -> tuple[int, list[str]]:
        async with receiving() as inside, WebhookPost(plain_http=True, resolver=Names([INSIDE])) as post:
            sink = post.sink(per_task=True)
            outcomes = [
                await sink.deliver(task(f"http://{name}:{inside.port}/")) for name in ("a.example", "b.example")
            ]
            return inside.connections, [why(outcome) for outcome in outcomes]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        connections, reasons = runner.run(attack())
    assert connections == 0
    assert all("is a loopback address" in reason for reason in reasons)


A, B = "a.example:443", "b.example:443"
MOST = 8


def told(story: Callable[[HostLimits], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """The test runs in virtual time, on limits without jitter."""

    @wraps(story)
    async def begin(loop: VirtualLoop) -> None:
        await story(HostLimits(MOST, chance=lambda: 0.0))

    return in_virtual_time(begin)


async def answer_within(seconds: float, hosts: HostLimits) -> None:
    """Sixty requests, each answered after so long."""
    for _ in range(60):
        one = hosts.enter(A)
        assert one is not None
        await elapse(seconds)
        one.leave(True)


def fill(hosts: HostLimits, name: str = A) -> list[HostSlot]:
    places = []
    while (place := hosts.enter(name)) is not None:
        places.append(place)
    return places


@told
async def test_a_host_has_so_many_places_and_no_other_host_has_less_for_it(hosts: HostLimits) -> None:
    places = fill(hosts)
    assert len(places) == MOST
    assert len(fill(hosts, B)) == MOST
    places[0].leave(True)
    assert len(fill(hosts)) == 1


@told
async def test_who_waits_gets_the_place_that_becomes_free(hosts: HostLimits) -> None:
    places = fill(hosts)
    waiting = [asyncio.ensure_future(hosts.wait(A)) for _ in range(2)]
    await elapse(PATIENCE / 2)
    assert hosts.enter(A) is None
    places[0].leave(True)
    assert hosts.enter(A) is None, "it is for who came first"
    await elapse(PATIENCE)
    assert isinstance(waiting[0].result(), HostSlot)
    assert waiting[1].result() is None
    assert hosts.busy(A) == MOST


@told
async def test_nobody_waits_long_and_at_a_host_that_hangs_nobody_waits_at_all(hosts: HostLimits) -> None:
    fill(hosts)
    began = virtual_time()
    assert await hosts.wait(A) is None
    assert virtual_time() - began == pytest.approx(PATIENCE)
    await elapse(1.0)
    began = virtual_time()
    assert await hosts.wait(A) is None
    assert virtual_time() == began


@told
async def test_who_is_cancelled_while_waiting_takes_no_place_along(hosts: HostLimits) -> None:
    places = fill(hosts)
    before, given = (asyncio.ensure_future(hosts.wait(A)) for _ in range(2))
    await asyncio.sleep(0)
    before.cancel()
    await asyncio.gather(before, return_exceptions=True)
    places.pop().leave(True)
    given.cancel()  # in the same moment that it is given one
    await asyncio.gather(given, return_exceptions=True)
    assert given.cancelled()
    assert hosts.busy(A) == MOST - 1
    assert len(fill(hosts)) == 1


@told
async def test_a_host_that_is_down_is_given_fewer_and_one_that_answers_all_again(hosts: HostLimits) -> None:
    seen = []
    for answered in (False, False, False, False, None, True, True, True, True):
        place = hosts.enter(A)
        assert place is not None
        place.leave(answered)
        seen.append(hosts.allowed(A))
    assert seen == [4, 2, 1, 1, 1, 2, 4, 8, 8]
    assert hosts.allowed(B) == MOST


@told
async def test_those_that_are_deferred_come_back_one_by_one(hosts: HostLimits) -> None:
    """And the longer a host takes, the farther apart, within bounds."""
    places = fill(hosts)
    await elapse(30.0)
    for place in places:
        place.leave(False)
    fill(hosts)
    pauses = [hosts.pause(A) for _ in range(1_000)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(pauses)]
    assert all(gap == pytest.approx(0.02) for gap in gaps)
    assert pauses[-1] == pytest.approx(20.0)
    await elapse(10.0)
    assert hosts.pause(A) == pytest.approx(10.02), "half of them are back by now"
    assert max(hosts.pause(A) for _ in range(100_000)) == pytest.approx(FARTHEST)


@told
async def test_none_comes_back_before_it_has_waited_for_as_long_as_the_host_has_been_silent(hosts: HostLimits) -> None:
    """Nor much later, while it is known to be quick: a host that stood still for a moment has its backlog back."""
    await answer_within(0.002, hosts)
    fill(hosts)
    await elapse(0.5)
    pauses = [hosts.pause(A) for _ in range(5_000)]
    assert min(pauses) == pytest.approx(0.5)
    assert max(pauses) < 2.0


@told
async def test_a_host_that_is_well_again_is_not_held_to_its_past(hosts: HostLimits) -> None:
    places = fill(hosts)
    await elapse(30.0)
    assert all(hosts.pause(A) == pytest.approx(30.0) for _ in range(1_000))
    for place in places:
        place.leave(False)
    await answer_within(0.005, hosts)
    fill(hosts)
    assert hosts.pause(A) < 2.0


@in_virtual_time
async def test_jitter_only_lengthens(loop: VirtualLoop) -> None:
    hosts = HostLimits(1)
    fill(hosts)
    pauses = [hosts.pause(A) for _ in range(50)]
    shortest = [0.02 * (place + 1) for place in range(50)]
    assert all(least <= pause <= 1.25 * least for least, pause in zip(shortest, pauses, strict=True))
    assert pauses != shortest


@told
async def test_hosts_are_forgotten_when_there_are_too_many_and_never_one_at_work(hosts: HostLimits) -> None:
    kept = hosts.enter(A)
    assert kept is not None
    for number in range(20_000):
        place = hosts.enter(f"{number}.example:443")
        assert place is not None
        place.leave(False)
    assert len(hosts._hosts) <= 4_096
    assert hosts.busy(A) == 1
    kept.leave(True)
    assert hosts.busy(A) == 0
    assert hosts.pause("0.example:443") == PATIENCE, "nothing is known of it any more"
