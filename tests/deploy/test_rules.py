"""The alert rules and the dashboard ask for what is there: every name and label of theirs is in a real exposition."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.deploy.promql import labels_grouped_by, selectors_of

if TYPE_CHECKING:
    from tests.deploy.conftest import Exposed

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
        done = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


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
