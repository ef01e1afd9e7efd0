"""The systemd unit, the proxy, the alert rules, and docs/deploy.md: what they name is there and is taken."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.commands import check_command, check_environment
from tests.deploy.conftest import Exposed
from tests.deploy.promql import labels_grouped_by, selectors_of
from tests.programs import Ended, run
from tests.stores.certificates import certify

from bide.cli.exits import Exit
from bide.core.instants import duration
from bide.service.schemas import LONGEST_WAIT

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze, which comes with systemd, is not installed"
)
MOST_EXPOSED = 15
"""Tenths of systemd's measure, which goes up to 100; a service that is not locked up has some 96."""


@pytest.fixture(scope="module", params=["bide.service", "bide-work.service"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def unit(deploy: Path, name: str) -> dict[str, list[str]]:
    """All values of each directive; a directive may come twice."""
    found: dict[str, list[str]] = defaultdict(list)
    section = ""
    for line in (deploy / name).read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        if re.fullmatch(r"\[\w+\]", line):
            section = line
            continue
        directive, equals, value = line.partition("=")
        assert equals, line
        assert re.fullmatch(r"[A-Z]\w+", directive), line
        assert section in {"[Unit]", "[Service]", "[Install]"}
        found[directive].append(value)
    return found


def one(unit: dict[str, list[str]], name: str) -> str:
    [value] = unit[name]
    return value


def environment(unit: dict[str, list[str]]) -> dict[str, str]:
    return dict(given.split("=", 1) for given in unit["Environment"])


def test_the_command_is_one_that_bide_takes(unit: dict[str, list[str]], name: str) -> None:
    program, *words = shlex.split(one(unit, "ExecStart"))
    assert program == "/opt/bide/bin/bide"
    options = check_command(words)
    if name == "bide.service":
        assert options["host"] == "127.0.0.1"
        assert options["path"] == "/etc/bide/bide.toml"
    else:
        assert options["processes"] > 1
    check_environment(environment(unit))


def test_the_stores_url_is_a_credential(unit: dict[str, list[str]]) -> None:
    name, _, path = one(unit, "LoadCredential").partition(":")
    assert environment(unit)["BIDE_STORE_FILE"] == f"%d/{name}"
    assert path == "/etc/bide/store"


def test_it_is_waited_for_longer_than_a_drain_takes(unit: dict[str, list[str]]) -> None:
    assert one(unit, "KillSignal") == "SIGTERM"
    assert one(unit, "KillMode") == "mixed"
    assert duration(one(unit, "TimeoutStopSec")) >= duration(environment(unit)["BIDE_GRACE"]) + 10_000


def test_it_is_not_started_again_where_that_would_not_help(unit: dict[str, list[str]]) -> None:
    assert one(unit, "Restart") == "on-failure"
    codes = {Exit(int(code)) for code in one(unit, "RestartPreventExitStatus").split()}
    assert codes == {Exit.BAD_INPUT, Exit.DAMAGED, Exit.SETUP}
    assert one(unit, "StartLimitIntervalSec") == "0", "a store that is away may be so for long"


def analyzed(deploy: Path, name: str, tmp_path: Path, *arguments: str) -> Ended:
    """What systemd-analyze says of the unit, with a program that exists here."""
    text = (deploy / name).read_text(encoding="utf-8")
    path = tmp_path / name
    path.write_text(text.replace("/opt/bide/bin/bide", sys.executable), encoding="utf-8")
    return run("systemd-analyze", *arguments, path, code=None)


@needs_systemd
def test_systemd_takes_it_without_a_word(deploy: Path, name: str, tmp_path: Path) -> None:
    done = analyzed(deploy, name, tmp_path, "verify")
    assert done.returncode == 0, done.stderr
    assert name not in done.stderr, done.stderr


@needs_systemd
def test_systemd_finds_it_locked_up(deploy: Path, name: str, tmp_path: Path, root: Path) -> None:
    done = analyzed(deploy, name, tmp_path, "security", "--offline=true", f"--threshold={MOST_EXPOSED}")
    if "--offline" in done.stderr or "unrecognized option" in done.stderr:
        pytest.skip("this systemd is older than 250")
    assert done.returncode == 0, done.stdout
    level = re.search(rf"exposure level for {re.escape(name)}: ([\d.]+)", done.stdout)
    assert level is not None
    assert f"says {level[1]} of 10" in (root / "docs" / "deploy.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def proxy(deploy: Path) -> str:
    """Without its comments."""
    return re.sub(r"#[^\n]*", "", (deploy / "nginx.conf").read_text(encoding="utf-8"))


def location(proxy: str, path: str) -> str:
    found = re.search(rf"location (?:= )?{re.escape(path)}\s*\{{([^}}]*)\}}", proxy)
    assert found is not None, path
    return found[1]


def seconds(block: str, name: str) -> int:
    found = re.search(rf"{name} (\d+)s;", block)
    assert found is not None, name
    return int(found[1])


def test_braces_and_semicolons(proxy: str) -> None:
    assert proxy.count("{") == proxy.count("}")
    for line in proxy.splitlines():
        assert not line.strip() or line.rstrip().endswith((";", "{", "}")), line


def test_a_consumer_may_wait_as_long_as_the_service_lets_it(proxy: str) -> None:
    assert seconds(location(proxy, "/v1/lease"), "proxy_read_timeout") >= LONGEST_WAIT + 10


def test_a_stream_is_not_held_back(proxy: str) -> None:
    events = location(proxy, "/v1/events")
    assert {"proxy_buffering off;", "proxy_cache off;", "gzip off;"} <= {line.strip() for line in events.splitlines()}
    assert seconds(events, "proxy_read_timeout") >= 45, "some of its heartbeats may be late"


def test_paths_are_passed_on_as_they_came(proxy: str) -> None:
    assert "merge_slashes off;" in proxy
    for target in re.findall(r"proxy_pass ([^;]+);", proxy):
        assert re.fullmatch(r"http://\w+", target), "a path here would be decoded and put together again"


def test_nothing_is_sent_twice_and_inside_stays_inside(proxy: str) -> None:
    assert "proxy_next_upstream off;" in proxy
    for path in ("/metrics", "/readyz"):
        assert "return 404;" in location(proxy, path)


def test_no_other_name_is_passed_on(proxy: str) -> None:
    [other] = [server for server in proxy.split("server {")[1:] if "default_server" in server]
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
    run("nginx", "-t", "-c", main)


OF_PROMETHEUS: dict[str, list[dict[str, str]]] = {"up": [{}]}
"""Series that Prometheus makes itself."""
TARGET_LABELS = {"job", "instance"}
"""Labels that every series gets when it is scraped."""
CHOSEN = {"job", "instance", "topic", "call"}
"""Labels whose values are the installation's own."""


def rules(deploy: Path) -> list[dict[str, Any]]:
    document = yaml.safe_load((deploy / "alerts.yaml").read_text(encoding="utf-8"))
    assert list(document) == ["groups"]
    return [rule for group in document["groups"] for rule in group["rules"]]


def dashboard(deploy: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((deploy / "grafana-dashboard.json").read_text(encoding="utf-8"))
    return found


def expressions(deploy: Path) -> dict[str, str]:
    """Every expression of both files, by where it stands."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in rules(deploy)}
    for panel in dashboard(deploy)["panels"]:
        for target in panel.get("targets", ()):
            found[f"panel {panel['id']} {panel['title']}, {target['refId']}"] = target["expr"]
    return found


def test_every_series_that_is_asked_for_exists(deploy: Path, exposed: Exposed) -> None:
    known = {**exposed.samples, **OF_PROMETHEUS}
    asked: set[str] = set()
    for where, expression in expressions(deploy).items():
        selectors = selectors_of(expression)
        assert selectors, where
        for selector in selectors:
            assert selector.name in known, f"{where}: there is no metric {selector.name}"
            asked.add(selector.name)
            series = known[selector.name]
            labels = {label for one in series for label in one} | TARGET_LABELS
            for matcher in selector.matchers:
                assert matcher.label in labels, f"{where}: {selector.name} has no label {matcher.label}"
                values = {one[matcher.label] for one in series if matcher.label in one}
                if matcher.label not in CHOSEN:
                    assert any(map(matcher.takes, values)), f"{where}: {matcher} matches none of {sorted(values)}"
        by_name = [{label for one in known[each.name] for label in one} | TARGET_LABELS for each in selectors]
        for label in labels_grouped_by(expression):
            assert any(label in labels for labels in by_name), f"{where}: nothing in it has the label {label}"

    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in asked}
    assert exposed.families - families <= {"bide_build_info"}, "what is counted is looked at"


def test_names_in_texts_and_variables_exist(deploy: Path, exposed: Exposed) -> None:
    for variable in dashboard(deploy)["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((\w+)(?:\{[^}]*\})?, (\w+)\)", variable["query"]["query"])
            assert found is not None
            assert found[1] in exposed.samples
            assert found[2] in {*exposed.samples[found[1]][0], *TARGET_LABELS}
    for rule in rules(deploy):
        used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        kept = labels_grouped_by(rule["expr"])
        if not re.match(r"(sum|max)", rule["expr"]) and not kept:
            kept = {*TARGET_LABELS}
        assert used <= kept, f"{rule['alert']}: its expression leaves no label {used - kept}"


def test_every_alert_says_what_it_is(deploy: Path) -> None:
    names = [rule["alert"] for rule in rules(deploy)]
    assert len(set(names)) == len(names)
    for rule in rules(deploy):
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"Bide[A-Z][A-Za-z]+", rule["alert"])
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert "for" not in rule or re.fullmatch(r"\d+[ms]", rule["for"])


def test_every_alert_is_explained(deploy: Path, root: Path) -> None:
    text = (root / "docs" / "deploy.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `(Bide\w+)` \|", text, re.MULTILINE)
    assert explained == [rule["alert"] for rule in rules(deploy)]


def test_every_alert_is_set_off_in_a_test(deploy: Path, root: Path) -> None:
    document = yaml.safe_load((root / "tests" / "deploy" / "alerts_test.yaml").read_text(encoding="utf-8"))
    cases = [one for story in document["tests"] for one in story["alert_rule_test"]]
    silent = {one["alertname"] for one in cases if not one["exp_alerts"]}
    loud = {one["alertname"] for one in cases if one["exp_alerts"]}
    assert silent == loud == {rule["alert"] for rule in rules(deploy)}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, which comes with Prometheus, is not installed")
def test_prometheus_takes_the_rules_and_they_go_off_when_they_should(deploy: Path, root: Path, tmp_path: Path) -> None:
    for file in (deploy / "alerts.yaml", root / "tests" / "deploy" / "alerts_test.yaml"):
        shutil.copy(file, tmp_path)
    for command in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        run("promtool", *command, cwd=tmp_path)


def test_the_dashboard_is_one_that_grafana_takes(deploy: Path) -> None:
    board = dashboard(deploy)
    assert board["id"] is None, "Grafana gives it one"
    assert (board["title"], board["uid"]) == ("bide", "bide")
    assert board["schemaVersion"] >= 36
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    variables = {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval"}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies upon another panel"
        taken |= cells
        assert panel["type"] in {"row", "stat", "timeseries"}
        if panel["type"] == "row":
            assert panel["panels"] == []
            continue
        assert panel["datasource"]["uid"] == "${datasource}", "the installation's own"
        assert panel["fieldConfig"]["defaults"]["unit"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(set(refs)) == len(refs)
        for target in panel["targets"]:
            used = set(re.findall(r"\$\{?(\w+)", target["expr"]))
            assert used <= variables, panel["title"]
            assert 'job="$job"' in target["expr"]


def test_counts_of_the_store_are_not_added_up_over_instances(deploy: Path) -> None:
    """Each instance counts the same store: a sum over them is a multiple of the truth."""
    for where, expression in expressions(deploy).items():
        if re.search(r"bide_(tasks|tasks_due|oldest_due_seconds)\{", expression):
            assert re.search(r"max( by \(topic\))? ?\(bide_(tasks|tasks_due|oldest)", expression), where


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    return (root / "docs" / "deploy.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def manifests(text: str) -> list[Any]:
    return [document for block in blocks(text, "yaml") for document in yaml.safe_load_all(block)]


@pytest.fixture(scope="module")
def deployment(text: str) -> dict[str, Any]:
    [found] = [one for one in manifests(text) if one.get("kind") == "Deployment"]
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def test_shell_blocks_are_ones_that_a_shell_reads(text: str) -> None:
    for block in blocks(text, "sh"):
        run("bash", "-n", given=block)


def commands(text: str) -> list[list[str]]:
    """Every call of bide, in blocks and within lines."""
    found = []
    for block in blocks(text, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for number, word in enumerate(words):
                calls = word == "bide-1" or word.endswith("/bin/bide") or (word == "bide" and "run" not in words)
                if calls and words[number + 1 :] and "build" not in words and words[number + 1] != "&&":
                    found.append(words[number + 1 :])
    return found + [shlex.split(inline) for inline in re.findall(r"`bide ([^`]+)`", text)]


def test_every_command_is_taken(text: str) -> None:
    found = commands(text)
    assert ["token", "add", "ops"] in found
    assert ["token", "add", "prometheus", "--verb", "metrics"] in found
    for words in found:
        if words in (["token", "add"], ["work"]):
            continue  # in a sentence, without what it is about
        check_command(words)


def test_settings_that_are_named_exist(text: str) -> None:
    given = dict(re.findall(r"\b(BIDE_[A-Z_]+)=(\S+)", text))
    named = set(re.findall(r"\bBIDE_[A-Z][A-Z_]+[A-Z]\b", text))
    check_environment({name: given.get(name, "1s") for name in named - {"BIDE_STORE", "BIDE_STORE_FILE"}})


def test_files_that_are_named_exist(text: str, root: Path) -> None:
    for path in set(re.findall(r"\bdeploy/[\w.-]+\b", text)):
        assert (root / path).exists() or path == "deploy/secrets", path
    for file in (root / "deploy").iterdir():
        if file.is_file() and file.suffix != ".dockerignore":
            assert f"deploy/{file.name}" in text, f"{file.name} is not spoken of"


def test_the_deployment_is_locked_up(deployment: dict[str, Any]) -> None:
    assert deployment["securityContext"]["runAsNonRoot"] is True
    assert deployment["enableServiceLinks"] is False
    [container] = deployment["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in deployment["volumes"]}
    assert not container["image"].endswith(":latest")


def test_the_deployment_is_probed_and_stopped_as_it_should_be(deployment: dict[str, Any]) -> None:
    [container] = deployment["containers"]
    options = check_command(container["args"])
    assert options["port"] == container["ports"][0]["containerPort"]
    environment = {one["name"]: one["value"] for one in container["env"]}
    check_environment(environment)
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert container["readinessProbe"]["timeoutSeconds"] > 2, "longer than /readyz takes"
    [_, before] = container["lifecycle"]["preStop"]["exec"]["command"]
    grace = duration(environment["BIDE_GRACE"]) / 1_000
    assert deployment["terminationGracePeriodSeconds"] >= int(before) + grace + 10


def test_the_scrape_is_named_as_the_rules_expect(text: str, root: Path) -> None:
    [config] = [one for one in manifests(text) if "scrape_configs" in one]
    [job] = config["scrape_configs"]
    rules = (root / "deploy" / "alerts.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r'job="(\w+)"', rules)) == {job["job_name"]}
    compose = yaml.safe_load((root / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
    published = [port.rpartition(":")[0] for one in compose["services"].values() for port in one.get("ports", ())]
    assert [target for one in job["static_configs"] for target in one["targets"]] == published
