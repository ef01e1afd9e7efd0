"""Store URLs of MySQL and MariaDB, and what of them is bide's own.

    mysql://[user[:password]@]host[:port][,host:port...]/database        mariadb:// is the same

`?prefix=bide_` (the default) is what the names of the tables begin with, `?schema=` another database on the same server
that they are in. Of several hosts the first that may be written to is taken. `ssl_mode` is one of "disabled" (the
default), "required", "verify_ca" and "verify_identity", with `ssl_ca`, `ssl_cert` and `ssl_key`; `socket` is the path
of a Unix socket instead of a host.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

from msgspec import Struct

from bide.core.errors import BadInput
from bide.stores.urls import parts_of

SCHEMES = ("mysql", "mariadb")
PREFIX = "bide_"
PORT = 3306
_ACCEPTED = '"mysql://user:password@host:3306/database", with options such as "?prefix=shop_"'
_OPTIONS = ("prefix", "schema", "socket", "ssl_ca", "ssl_cert", "ssl_key", "ssl_mode")
_MODES = ("disabled", "required", "verify_ca", "verify_identity")
_DATABASE = re.compile(r"[A-Za-z0-9_$-]{1,64}")
_PREFIX = re.compile(r"[a-z_][a-z0-9_]{0,39}")


class Address(Struct, frozen=True, kw_only=True):
    """The parts of a URL."""

    hosts: tuple[tuple[str, int], ...]
    user: str
    password: str
    database: str
    """The database that the connection names; empty if the URL does not."""
    schema: str
    """The database that the tables are in."""
    prefix: str = PREFIX
    socket: str = ""
    options: Mapping[str, str] = {}
    """Those of TLS."""
    shown: str = ""
    """Without what is secret."""

    def tls(self) -> Any:
        """How the connection is to be encrypted; None: not at all. Raises BadInput for files that are of no use."""
        mode = self.options.get("ssl_mode", "required" if "ssl_ca" in self.options else "disabled")
        if mode == "disabled":
            return None
        checks = mode in ("verify_ca", "verify_identity") or "ssl_ca" in self.options
        try:
            context = ssl.create_default_context(cafile=self.options.get("ssl_ca"))
            context.check_hostname = mode == "verify_identity"
            context.verify_mode = ssl.CERT_REQUIRED if checks else ssl.CERT_NONE
            if "ssl_cert" in self.options:
                context.load_cert_chain(self.options["ssl_cert"], self.options.get("ssl_key"))
        except OSError as error:
            files = {name: value for name, value in self.options.items() if name != "ssl_mode"}
            raise BadInput("ssl_ca", files, f"files of certificates that can be read ({error})") from None
        return context


def address_of(url: str) -> Address:
    """Read a URL. Raises BadInput that names what is wrong, and never shows a password."""
    parts = parts_of(url, _ACCEPTED, schemes=SCHEMES)
    given: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _OPTIONS:
            raise BadInput("store", f"?{name}=", f"one of {', '.join(_OPTIONS)}")
        given[name] = value
    database = unquote(parts.path.removeprefix("/"))
    prefix, schema = given.pop("prefix", PREFIX), given.pop("schema", database)
    socket = given.pop("socket", "")
    if not _PREFIX.fullmatch(prefix):
        raise BadInput("prefix", prefix, "1 to 40 of a-z, 0-9 and _, the first no digit")
    if not _DATABASE.fullmatch(schema):
        field = "schema" if schema != database else "store"
        raise BadInput(field, schema, f"the name of a database, of letters, digits, _, - and $: {_ACCEPTED}")
    if database and not _DATABASE.fullmatch(database):
        raise BadInput("store", database, f"the name of a database, of letters, digits, _, - and $: {_ACCEPTED}")
    if given.get("ssl_mode", "disabled") not in _MODES:
        raise BadInput("ssl_mode", given["ssl_mode"], f"one of {', '.join(_MODES)}")
    if given.get("ssl_mode") == "disabled" and len(given) > 1:
        raise BadInput("ssl_mode", "disabled", "required, verify_ca or verify_identity, where there are certificates")
    account, _, places = parts.netloc.rpartition("@")
    user, _, password = account.partition(":")
    hosts = tuple(_host(place) for place in (places or "localhost").split(","))
    where = socket or places or "localhost"
    return Address(
        hosts=hosts,
        user=unquote(user),
        password=unquote(password),
        database=database,
        schema=schema,
        prefix=prefix,
        socket=socket,
        options=given,
        shown=f"{where}/{schema} {prefix}*",
    )


def _host(place: str) -> tuple[str, int]:
    host, colon, port = place.rpartition(":") if not place.endswith("]") else (place, "", "")
    if not colon:
        host, port = place, str(PORT)
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65_536:
        raise BadInput("store", place, _ACCEPTED)
    return host.removeprefix("[").removesuffix("]"), int(port)
