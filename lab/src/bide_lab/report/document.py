"""The findings in Markdown: a file of its own, and the generated parts of docs/strategies.md, in two languages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from bide_lab.report.charts import Picture, pictures, write_pictures
from bide_lab.report.content import Block, Bullets, Drawing, Part, Section, Table, sections, ways
from bide_lab.report.findings import NOT_ASKED, NOT_SEEN, Findings, findings
from bide_lab.running import ResultsFile

TITLE = "Delayed tasks, measured"
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


def markdown(found: Findings, drawn: Sequence[Picture] = ()) -> str:
    """A report as a file that reads well as plain text."""
    parts = [Part(one.title, [one.about, *one.blocks]) for one in sections(found, drawn)]
    return written([f"# {TITLE}", *ways(found.results), *parts], level=2)


class Document:
    """The generated parts of docs/strategies.md, from one results file; its pictures are in `folder`."""

    def __init__(self, results: Path, folder: Path) -> None:
        self.folder = folder
        self.found: Findings = findings(ResultsFile(results).read())
        self.pictures: Sequence[Picture] = pictures(self.found)
        self.note = f"from results {hashlib.sha256(results.read_bytes()).hexdigest()[:16]}"

    def way(self) -> str:
        """How it was measured."""
        return written(ways(self.found.results))

    def cards(self, name: str) -> str:
        """The idea of a family, and the card of each of its files."""
        section = self._section(name)
        return written([section.about, *(one for one in section.blocks if isinstance(one, Part))])

    def measured(self, name: str, *, chinese: bool = False) -> str:
        """All else of a section: tables, lists, and pictures."""
        blocks = [one for one in self._section(name, chinese).blocks if not isinstance(one, Part)]
        return written(map(_in_chinese, blocks) if chinese else blocks, folder=f"{self.folder.name}/")

    def _section(self, name: str, chinese: bool = False) -> Section:
        return next(one for one in sections(self.found, self.pictures, chinese=chinese) if one.name == name)

    def stale_pictures(self) -> list[Path]:
        """Those that are missing, are of other results, or are of none of these."""
        wanted = {self.folder / f"{one.name}.svg" for one in self.pictures}
        here = set(self.folder.glob("*.svg"))
        old = {path for path in here & wanted if f" {self.note} -->\n" not in path.read_text(encoding="utf-8")}
        return sorted((wanted - here) | (here - wanted) | old)

    def draw(self) -> list[Path]:
        """Draw all again."""
        return write_pictures(self.pictures, self.folder, self.note)


def _in_chinese(block: Block) -> Block:
    """Its words that are in `CHINESE`."""
    if isinstance(block, str):
        return CHINESE.get(block, block)
    if isinstance(block, Table):
        heads, *lines = ([CHINESE.get(one, one) for one in line] for line in [block.heads, *block.lines])
        return block._replace(heads=heads, lines=lines)
    if isinstance(block, Bullets):
        parts = [line.partition(": ") for line in block.lines]
        return Bullets([f"{names}{colon}{CHINESE.get(why, why)}" for names, colon, why in parts])
    if isinstance(block, Picture):
        caption = block.caption
        for english, other in _CAPTIONS.items():
            caption = caption.replace(english, other)
        return replace(block, caption=caption)
    return block


def written(blocks: Iterable[Block], *, level: int = 3, folder: str = "") -> str:
    """Markdown. `level`: that of headings; `folder`: where the pictures are. Those in a row stand in one paragraph."""
    text = ""
    before: Block = ""
    for block in blocks:
        beside = isinstance(block, Picture) and isinstance(before, Picture)
        text += ("\n" if beside else "\n\n" if text else "") + _markdown(block, level, folder)
        before = block
    return text + "\n"


def _markdown(block: Block, level: int, folder: str) -> str:
    match block:
        case str():
            return block
        case Bullets(lines):
            return "\n".join(f"- {line}" for line in lines)
        case Drawing(text):
            return f"```text\n{text}\n```"
        case Part(title, blocks):
            return written([f"{'#' * level} {title}", *blocks], level=level + 1).removesuffix("\n")
        case Table():
            return _table(block)
        case Picture():
            return f"![{block.caption}]({folder}{block.name}.svg)"
    assert_never(block)


def _table(given: Table) -> str:
    """The first column is bold."""
    rules = ["---:" if number in given.right else "---" for number in range(len(given.heads))]
    lines = [[f"**{line[0]}**", *line[1:]] for line in given.lines]
    body = [" | ".join(one.replace("|", "\\|") for one in line) for line in [given.heads, *lines]]
    return "\n".join([f"| {body[0]} |", f"|{'|'.join(rules)}|", *(f"| {line} |" for line in body[1:])])
