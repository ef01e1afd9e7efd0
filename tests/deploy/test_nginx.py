"""The example of a proxy with TLS: what it must not do to long polls, streams and keys, and that nginx takes it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.stores.certificates import certify

from bide.service.schemas import LONGEST_WAIT


@pytest.fixture(scope="module")
def text(deploy: Path) -> str:
    """Without its comments."""
    return re.sub(r"#[^\n]*", "", (deploy / "nginx.conf").read_text(encoding="utf-8"))


def location(text: str, path: str) -> str:
    found = re.search(rf"location (?:= )?{re.escape(path)}\s*\{{([^}}]*)\}}", text)
    assert found is not None, path
    return found[1]


def seconds(block: str, name: str) -> int:
    found = re.search(rf"{name} (\d+)s;", block)
    assert found is not None, name
    return int(found[1])


def test_braces_and_semicolons(text: str) -> None:
    assert text.count("{") == text.count("}")
    for line in text.splitlines():
        assert not line.strip() or line.rstrip().endswith((";", "{", "}")), line


def test_a_consumer_may_wait_as_long_as_the_service_lets_it(text: str) -> None:
    assert seconds(location(text, "/v1/lease"), "proxy_read_timeout") >= LONGEST_WAIT + 10


def test_a_stream_is_not_held_back(text: str) -> None:
    events = location(text, "/v1/events")
    assert {"proxy_buffering off;", "proxy_cache off;", "gzip off;"} <= {line.strip() for line in events.splitlines()}
    assert seconds(events, "proxy_read_timeout") >= 45, "some of its heartbeats may be late"


def test_paths_are_passed_on_as_they_came(text: str) -> None:
    assert "merge_slashes off;" in text
    for target in re.findall(r"proxy_pass ([^;]+);", text):
        assert re.fullmatch(r"http://\w+", target), "a path here would be decoded and put together again"


def test_nothing_is_sent_twice_and_inside_stays_inside(text: str) -> None:
    assert "proxy_next_upstream off;" in text
    for path in ("/metrics", "/readyz"):
        assert "return 404;" in location(text, path)


def test_no_other_name_is_passed_on(text: str) -> None:
    [other] = [server for server in text.split("server {")[1:] if "default_server" in server]
    assert other.count("default_server;") == 4
    assert "return 421;" in other
    assert "proxy_pass" not in other


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_takes_it(deploy: Path, tmp_path: Path) -> None:
    tls = tmp_path / "tls"
    tls.mkdir()
    certify(tls)
    given = (deploy / "nginx.conf").read_text(encoding="utf-8")
    given = re.sub(r"/etc/nginx/tls/bide\.(crt|key)", rf"{tls}/server.\1", given)
    (tmp_path / "bide.conf").write_text(given, encoding="utf-8")
    lines = [f"{kind}_temp_path {tmp_path}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
    lines += ["access_log off;", f"include {tmp_path}/bide.conf;"]
    main = tmp_path / "nginx.conf"
    main.write_text(
        f"pid {tmp_path}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{\n{chr(10).join(lines)}\n}}\n", encoding="utf-8"
    )
    done = subprocess.run(["nginx", "-t", "-c", str(main)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
