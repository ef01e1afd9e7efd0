"""The report of a results file: findings, tables, pictures, a page, and the parts of the documentation."""

from __future__ import annotations

import doctest
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.lab.reported import late, made, result, some_results

from bide_lab import figures, findings, strategy
from bide_lab.figures import Result
from bide_lab.findings import NOT_ASKED, Findings, Row
from bide_lab.report import charts
from bide_lab.report import page as pages
from bide_lab.report.charts import DARK, LIGHT, alone, pictures, write_pictures
from bide_lab.report.content import ahead, cell_table
from bide_lab.report.page import Document, markdown, page, write_report
from bide_lab.running import ResultsFile
from bide_lab.strategies import OWN, catalogue, families, family_of
from bide_lab.strategies.brokers import s09_delay_levels
from bide_lab.strategies.timers import s13_ring

VOID = {"meta", "link", "br", "img", "input"}
"""Elements without an end."""


@pytest.fixture(scope="module")
def found() -> Findings:
    return findings.findings(some_results())


def row_of(found: Findings, name: str) -> Row:
    [row] = [row for row in found.rows if row.name == name]
    return row


def ahead_of_bide(*results: Result) -> dict[str, list[str]]:
    return {one.measure.name: [name for name, _ in one.ahead] for one in findings.findings(results).better}


@pytest.mark.parametrize(
    "module", [figures, charts, strategy, s09_delay_levels, s13_ring], ids=lambda module: module.__name__
)
def test_examples_in_docstrings_are_true(module: object) -> None:
    failed, tried = doctest.testmod(module)  # type: ignore[arg-type]
    assert tried > 0
    assert not failed


def test_every_strategy_of_the_lab_has_a_family_and_a_row(found: Findings) -> None:
    every = catalogue()
    assert [row.name for row in found.rows] == list(every)
    assert all(family_of(strategy) in families() for strategy in every.values())
    assert {row.family for row in found.rows} <= set(found.families)


def test_what_was_not_measured_says_why(found: Findings) -> None:
    assert row_of(found, "S3").why_not == "not measured here: no postgres server was given"
    assert row_of(found, "S7").why_not == NOT_ASKED
    assert not row_of(found, "S4-A").why_not


def test_a_strategy_that_only_the_results_know_is_reported_too() -> None:
    row = row_of(findings.findings([result("mine", "steady", made(late=late(1, 2)))]), "mine")
    assert row.family is OWN
    assert row.measured


def test_the_best_of_bides_rows_is_what_others_have_to_beat() -> None:
    ours = [result("bide-redis", "burst", made(late=late(1, 2), schedules_per_s=100.0)),
            result("bide-sqlite", "burst", made(late=late(1, 2), schedules_per_s=900.0))]  # fmt: skip
    theirs = result("S4-A", "burst", made(late=late(5, 9), schedules_per_s=500.0))
    assert "scheduled" not in ahead_of_bide(*ours, theirs)
    assert ahead_of_bide(ours[0], theirs)["scheduled"] == ["S4-A"]


def test_where_nobody_is_ahead_it_says_why() -> None:
    alone = [result("S12", "steady", made(late=late(1, 2)))]
    assert "not measured" in ahead(findings.findings(alone))
    both = findings.findings([*alone, result("bide-redis", "steady", made(late=late(0.1, 0.2)))])
    assert ahead(both) == "Nowhere in this run."
    assert "Nowhere in this run." in markdown(both)
    assert "Nowhere in this run." in page(both, [])


def test_figures_that_were_taken_in_another_way_are_not_compared() -> None:
    ours, theirs = made(late=late(1, 2)), made(late=late(0.1, 0.2))
    assert ahead_of_bide(result("bide-redis", "steady", ours), result("S12", "steady", theirs))
    assert not ahead_of_bide(result("bide-redis", "steady", ours), result("S12", "steady", theirs, quick=False))
    assert not ahead_of_bide(result("bide-redis", "steady", ours), result("S12", "steady", theirs, minute=60.0))


@pytest.mark.parametrize("wrong", [{"early": 1}, {"lost": 1, "fired": 99}], ids=["early", "lost"])
def test_who_fires_early_or_not_at_all_is_not_called_punctual(wrong: dict[str, int]) -> None:
    ours = result("bide-redis", "steady", made(late=late(1, 2)))
    assert not ahead_of_bide(ours, result("S12", "steady", made(late=late(0.1, 0.2), **wrong)))


def test_the_markdown_file_names_every_strategy_and_every_cell(found: Findings) -> None:
    text = markdown(found)
    assert all(f"{name}" in text for name in catalogue())
    assert len(cell_table(found.rows).lines) == len(some_results())
    assert "| **S4-B** | killed | 35 of 100 | 65 | 0 | 0 |" in text


class Elements(HTMLParser):
    """The elements of a page, and those that are not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.names: list[str] = []
        self.asked: list[str] = []
        self.kinds: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.kinds.add(tag)
        given = dict(attrs)
        self.names += [value for name in ("id",) if (value := given.get(name))]
        self.asked += [value for name in ("src", "href", "srcset", "action") if (value := given.get(name))]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def test_the_page_is_whole_and_asks_nobody_for_anything(found: Findings) -> None:
    text = page(found, pictures(found)[:2])
    elements = Elements()
    elements.feed(text)
    assert not elements.wrong
    assert not elements.open
    assert len(elements.names) == len(set(elements.names)), "an id stands once"
    assert all(one.startswith(("#", "data:")) for one in elements.asked)
    assert {one[1:] for one in elements.asked if one.startswith("#")} <= set(elements.names)
    assert not {"script", "iframe", "img", "object"} & elements.kinds
    assert not re.search(r"@import|url\((?!#)", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    assert all(name in text for name in catalogue())
    assert "NaN" not in text
    assert ">None<" not in text


def test_what_a_strategy_says_is_text_and_not_markup() -> None:
    text = page(findings.findings([result("<b>mine", "steady", made(late=late(1, 2)))]), [])
    assert "<b>mine" not in text
    assert "&lt;b&gt;mine" in text


def test_pictures_are_sound_and_the_same_each_time(found: Findings) -> None:
    drawn = pictures(found)
    names = [one.name for one in drawn]
    assert {"zsets-lateness", "zsets-faults", "zsets-idle", "timers-cost-insert-ns", "timers-cost-bytes"} <= set(names)
    assert len(names) == len(set(names))
    for one in drawn:
        svg = one.svg()
        whole = alone(svg, "a note")
        ElementTree.fromstring(whole)
        assert one is not drawn[0] or svg == one.svg()
        assert not [colour for colour in LIGHT if colour in svg], "every colour is a variable"
        assert all(colour in whole for colour in DARK.values())
        assert "width: 100" not in svg


def test_no_picture_holds_too_many_lines() -> None:
    names = [name for name, strategy in catalogue().items() if family_of(strategy).name == "timers"]
    many = findings.findings([result(name, "steady", made(late=late(1, 2))) for name in [*names, "bide-memory"]])
    drawn = [one for one in pictures(many) if one.name.startswith("timers-lateness")]
    assert len(names) > 7
    assert len(drawn) == 2
    both = [one.svg() for one in drawn]
    for svg in both:
        assert "bide-memory" in svg
        assert sum(f">{name}<" in svg for name in names) <= 7
    assert all(sum(f">{name}<" in svg for svg in both) == 1 for name in names)


def test_a_report_leaves_what_it_did_not_draw(found: Findings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, old = tmp_path / "logo.svg", tmp_path / "zsets-old.svg"
    other.write_text("<svg/>")
    [first, *_] = pictures(found)
    write_pictures([first], tmp_path)
    (tmp_path / f"{first.name}.svg").rename(old)
    monkeypatch.setattr(pages, "pictures", lambda _: [first])
    written = write_report(found, tmp_path)
    assert other.exists()
    assert not old.exists()
    assert written.page.stat().st_size > 10_000
    assert all(path.exists() for path in (*written.pictures, written.tables))


def test_pictures_of_other_results_are_stale(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "results.jsonl")
    for most in (110, 120):
        file.add(result("S4-A", "steady", made(late=late(50, most))))
        document = Document(file.path, tmp_path)
        assert len(document.stale_pictures()) == len(document.pictures)
        document.draw()
        assert not Document(file.path, tmp_path).stale_pictures()


def test_the_chinese_page_of_strategies_has_the_same_code_and_sections(root: Path) -> None:
    english, chinese = (
        (root / "docs" / name).read_text(encoding="utf-8") for name in ("strategies.md", "strategies.zh-CN.md")
    )
    blocks = re.compile(r"```(?:python|sh)\n.*?```", re.DOTALL)
    assert blocks.findall(chinese) == blocks.findall(english)
    for family in families():
        assert f"<!-- generated: lab-{family.name}-cards -->" in english
        assert f"<!-- generated: lab-{family.name}-measured -->" in english
        assert f"<!-- generated: lab-{family.name}-measured-zh -->" in chinese
    assert chinese.count("\n## ") == english.count("\n## ")
