"""The findings in Markdown: a file of its own, and the generated parts of docs/strategies.md, in two languages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bide_lab.report import tables
from bide_lab.report.charts import Picture, pictures, write_pictures
from bide_lab.report.findings import NOT_ASKED, NOT_SEEN, Family, Findings, findings
from bide_lab.running import ResultsFile
from bide_lab.strategies import PARTS

CHINESE: Mapping[str, str] = {
    "strategy": "策略", "known for": "已知缺陷", "workload": "负载", "seen here": "这里看到的",
    "counted besides": "另外的计数", "situation": "情形", "pick": "选择", "measured": "测得", "or": "或者",
    "measure": "指标", "best of bide": "bide 最好的", "ahead of it": "领先者",
    "late p50, ms": "延迟 p50，ms", "late p99, ms": "延迟 p99，ms",
    "fired/s": "每秒触发", "idle CPU, %": "空闲 CPU，%", "idle CPU, servers, %": "服务器空闲 CPU，%",
    "asked/s, idle": "空闲时每秒询问", "bytes/task": "字节/任务", "bytes/task, servers": "服务器字节/任务",
    "messages/task": "消息/任务", "schedule, µs": "schedule，µs", "reschedule, µs": "reschedule，µs",
    "cancel, µs": "cancel，µs", "fire_now, µs": "fire_now，µs", NOT_ASKED: "本次未运行", NOT_SEEN: "本次未出现",
    "Nowhere in this run.": "在这次运行中没有。",
    "bide was not measured in this run, so nothing can be said.": "这次运行没有测量 bide，无从比较。",
}  # fmt: skip
"""Heads of tables, and the words for what was not seen, in Chinese; all else stays as it was measured."""

_CAPTIONS = {
    "How late, under a steady load": "平稳负载下的延迟", "Tasks fired a second, in a burst": "突发时每秒触发的任务",
    "Processor time while nothing is due": "没有任务到期时的处理器时间",
    "Memory for each task that waits": "每个等待任务的内存",
    "Lost, and done twice, where any were": "丢失的和重复执行的任务",
    "by how many wait": "随等待数量变化",
}  # fmt: skip
"""Parts of captions."""


class Text:
    """The findings in Markdown, part by part, in English or Chinese."""

    def __init__(self, found: Findings, *, chinese: bool = False) -> None:
        self.found = found
        self._chinese = chinese

    def flaws(self) -> str:
        """The flaws of each strategy, and what was seen of them."""
        return self._table(tables.flaw_table(self.found.rows))

    def ahead(self) -> str:
        """Where others are ahead of bide, or that they nowhere are."""
        return self._words(self.found.nobody_ahead) or self._table(tables.ahead_table(self.found))

    def picks(self) -> str:
        """Which to pick when."""
        return self._table(tables.picks_table(self.found, chinese=self._chinese))

    def family(self, family: Family) -> Iterator[str]:
        """The tables of a family, and the reasons for all that was not measured and for the verbs that it has not."""
        rows = self.found.of(family)
        for given in (tables.measure_table(self.found, family), tables.counted_table(rows)):
            if given is not None:
                yield self._table(given)
        if left_out := tables.not_measured(rows):
            yield bullets([f"{', '.join(names)}: {self._words(why)}" for why, names in left_out])
        if missing := tables.missing_verbs(rows):
            words = "{1} 没有 {0}：{2}" if self._chinese else "no {0} in {1}: {2}"
            yield bullets([
                words.format(", ".join(f"`{verb}`" for verb in one.verbs), ", ".join(one.names), one.why)
                for one in missing
            ])  # fmt: skip

    def caption(self, picture: Picture) -> str:
        text = picture.caption
        for english, other in _CAPTIONS.items() if self._chinese else ():
            text = text.replace(english, other)
        return text

    def _words(self, text: str) -> str:
        return CHINESE.get(text, text) if self._chinese else text

    def _table(self, given: tables.Table) -> str:
        lines = [[self._words(one) for one in line] for line in given.lines]
        return table(tables.Table([self._words(one) for one in given.heads], lines, given.right))


def markdown(found: Findings) -> str:
    """The tables of a report as a file that reads well as plain text."""
    text = Text(found)
    parts = ["# Delayed tasks, measured", *tables.ways(found.results)]
    parts += ["## What each is known for", text.flaws()]
    parts += ["## Where another is ahead of bide", text.ahead()]
    parts += ["## Which to pick when", text.picks()]
    for family in found.families:
        parts += [f"## {family.title}", family.about, *text.family(family)]
    return "\n\n".join([*parts, "## Every cell", table(tables.cell_table(found.rows))]) + "\n"


class Document:
    """The generated parts of docs/strategies.md, from one results file; its pictures are in `folder`."""

    def __init__(self, results: Path, folder: Path) -> None:
        self.folder = folder
        self.found: Findings = findings(ResultsFile(results).read())
        self.pictures: Sequence[Picture] = pictures(self.found)
        self.note = f"from results {hashlib.sha256(results.read_bytes()).hexdigest()[:16]}"

    def way(self) -> str:
        """How it was measured."""
        return "\n\n".join(tables.ways(self.found.results)) + "\n"

    def text(self, *, chinese: bool = False) -> Text:
        return Text(self.found, chinese=chinese)

    def cards(self, family: Family) -> str:
        """The idea of the family, and the card of each of its files."""
        parts = [family.about]
        for card, rows in tables.cards_of(self.found.of(family)):
            parts += [f"### {card.title}", bullets([f"`{row.name}`: {row.strategy.title}" for row in rows])]
            parts.append(f"```text\n{card.drawing}\n```")
            parts += [f"**{name}.** {card.parts[name]}" for name in PARTS]
        return "\n\n".join(parts) + "\n"

    def measured(self, family: Family, *, chinese: bool = False) -> str:
        """Pictures and tables of a family."""
        text = self.text(chinese=chinese)
        drawn = [f"![{text.caption(one)}]({self.folder.name}/{one.name}.svg)"
                 for one in self.pictures if one.family is family]  # fmt: skip
        return "\n\n".join([*(["\n".join(drawn)] if drawn else []), *text.family(family)]) + "\n"

    def stale_pictures(self) -> list[Path]:
        """Those that are missing, are of other results, or are of none of these."""
        wanted = {self.folder / f"{one.name}.svg" for one in self.pictures}
        here = set(self.folder.glob("*.svg"))
        old = {path for path in here & wanted if f" {self.note} -->\n" not in path.read_text(encoding="utf-8")}
        return sorted((wanted - here) | (here - wanted) | old)

    def draw(self) -> list[Path]:
        """Draw all again."""
        return write_pictures(self.pictures, self.folder, self.note)


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def table(given: tables.Table) -> str:
    """A Markdown table, the first column bold."""
    rules = ["---:" if number in given.right else "---" for number in range(len(given.heads))]
    lines = [[f"**{line[0]}**", *line[1:]] for line in given.lines]
    body = [" | ".join(one.replace("|", "\\|") for one in line) for line in [given.heads, *lines]]
    return "\n".join([f"| {body[0]} |", f"|{'|'.join(rules)}|", *(f"| {line} |" for line in body[1:])])
