"""Deleting the keys of one test from a server that others use too, whichever kind the URL names."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

from bide_proofs.servers.resp import Connection

_BATCH = 1_000


def delete_keys(url: str, part: str) -> int:
    """Every key with `part` in its name, on every master; how many there were. O(all keys of the server).

    `url` is redis://HOST:PORT/DB, redis+cluster://HOST:PORT,HOST:PORT or redis+sentinel://HOST:PORT,.../SERVICE/DB,
    each with user:password@ where one is needed. Raises `OSError`, `Refused`.
    """
    deleted = 0
    for master in masters_of(url):
        with master:
            deleted += _delete(master, part)
    return deleted


def masters_of(url: str) -> Iterator[Connection]:
    """A connection to each server that has keys of its own, logged in and with the database chosen; yours to close."""
    split = urlsplit(url)
    login, _, hosts = split.netloc.rpartition("@")
    addresses = [_address(host) for host in hosts.split(",")]
    path = [part for part in split.path.split("/") if part]
    if split.scheme == "redis+cluster":
        with _connected(addresses, login) as seed:
            shown = seed.ask("CLUSTER", "NODES")
        assert isinstance(shown, str)
        nodes = [line.split() for line in shown.splitlines()]
        addresses = [
            _address(words[1].partition("@")[0])
            for words in nodes
            if "master" in words[2] and not {"fail", "noaddr"} & set(words[2].split(","))
        ]
    elif split.scheme == "redis+sentinel":
        with _connected(addresses, "") as sentinel:
            address = sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", path.pop(0))
        assert isinstance(address, list)
        addresses = [(str(address[0]), int(str(address[1])))]
    for one in addresses:
        master = _connected([one], login)
        if path:
            master.ask("SELECT", path[0])
        yield master


def _connected(addresses: list[tuple[str, int]], login: str) -> Connection:
    """To the first that answers."""
    problem: OSError | None = None
    for host, port in addresses:
        try:
            connection = Connection(host, port, timeout=60)
        except OSError as error:
            problem = error
            continue
        if login:
            user, _, password = login.partition(":")
            connection.ask("AUTH", *([unquote(user)] if user else []), unquote(password))
        return connection
    raise problem or OSError("no address was given")


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def _delete(master: Connection, part: str) -> int:
    cursor, deleted = "0", 0
    while True:
        reply = master.ask("SCAN", cursor, "MATCH", f"*{part}*", "COUNT", _BATCH)
        assert isinstance(reply, list)
        keys = reply[1]
        assert isinstance(keys, list)
        # one by one, since a cluster takes several keys in one command only if they share a slot
        deleted += sum(int(str(gone)) for gone in master.ask_all([("UNLINK", str(key)) for key in keys]))
        cursor = str(reply[0])
        if cursor == "0":
            return deleted
