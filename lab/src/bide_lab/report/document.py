"""The parts of docs/strategies.md that come from cards and from a results file, and of the same page in Chinese."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from bide_lab.card import PARTS, Card
from bide_lab.report.families import Family
from bide_lab.report.findings import NOT_ASKED, NOT_SEEN, Findings, Row, findings
from bide_lab.report.markdown import bullets, missing_words, table
from bide_lab.report.picks import picks_table
from bide_lab.report.pictures import Picture, pictures
from bide_lab.report.tables import (
    Missing,
    Table,
    ahead_table,
    counted_table,
    flaw_table,
    measure_table,
    missing_verbs,
    not_measured,
)
from bide_lab.report.way import ways
from bide_lab.report.writing import MARK, write_pictures
from bide_lab.running import ResultsFile

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
"""What heads of tables, and the words for what was not seen, are in Chinese; all else is as it was measured."""

_CAPTIONS = {
    "How late, under a steady load": "平稳负载下的延迟", "Tasks fired a second, in a burst": "突发时每秒触发的任务",
    "Processor time while nothing is due": "没有任务到期时的处理器时间",
    "Memory for each task that waits": "每个等待任务的内存",
    "Lost, and done twice, where any were": "丢失的和重复执行的任务",
    "by how many wait": "随等待数量变化",
}  # fmt: skip
"""Parts of captions."""


class Document:
    """What the pages hold of one results file, whose pictures are in `folder`."""

    def __init__(self, results: Path, folder: Path) -> None:
        self.folder = folder
        self.found: Findings = findings(ResultsFile(results).read())
        self.pictures: Sequence[Picture] = pictures(self.found)
        self.digest = hashlib.sha256(results.read_bytes()).hexdigest()[:16]

    def way(self) -> str:
        """How it was measured."""
        return "\n\n".join(ways(self.found.results)) + "\n"

    def flaws(self, *, chinese: bool = False) -> str:
        """What each strategy is known for, and what was seen of it."""
        return self._table(flaw_table(self.found.rows), chinese) + "\n"

    def ahead(self, *, chinese: bool = False) -> str:
        """Where others are ahead of bide."""
        if self.found.nobody_ahead:
            return f"{_translated(self.found.nobody_ahead, chinese)}\n"
        return self._table(ahead_table(self.found.better), chinese) + "\n"

    def picks(self, *, chinese: bool = False) -> str:
        """Which to pick when."""
        return self._table(picks_table(self.found, chinese=chinese), chinese) + "\n"

    def cards(self, family: Family) -> str:
        """What the family has in common, and the card of each of its files."""
        parts = [family.about]
        cards: dict[str, tuple[Card, list[Row]]] = {}
        for row in self.found.of(family):
            if row.card is not None:
                cards.setdefault(row.card.title, (row.card, []))[1].append(row)
        for card, rows in cards.values():
            parts += [f"### {card.title}", bullets([f"`{row.name}`: {row.title}" for row in rows])]
            parts.append(f"```text\n{card.drawing}\n```")
            parts += [f"**{name}.** {card.parts[name]}" for name in PARTS]
        return "\n\n".join(parts) + "\n"

    def measured(self, family: Family, *, chinese: bool = False) -> str:
        """Pictures and table of a family."""
        drawn = [
            f"![{_caption(one.caption, chinese)}]({self.folder.name}/{one.name}.svg)"
            for one in self.pictures
            if one.family is family
        ]
        parts = ["\n".join(drawn)] if drawn else []
        if (given := measure_table(self.found, family)) is not None:
            parts.append(self._table(given, chinese))
        rows = self.found.of(family)
        if (counted := counted_table(rows)) is not None:
            parts.append(self._table(counted, chinese))
        if left_out := not_measured(rows):
            parts.append(bullets([f"{', '.join(names)}: {_translated(why, chinese)}" for why, names in left_out]))
        if missing := missing_verbs(rows):
            parts.append(bullets([_missing(one) if chinese else missing_words(one) for one in missing]))
        return "\n\n".join(parts) + "\n"

    def _table(self, given: Table, chinese: bool) -> str:
        if not chinese:
            return table(given)
        lines = [[_translated(one, chinese) for one in line] for line in given.lines]
        return table(Table([_translated(one, chinese) for one in given.heads], lines, given.right))

    def stale_pictures(self) -> list[Path]:
        """Those that are missing, are of other results, or are of none of these."""
        wanted = {self.folder / f"{one.name}.svg" for one in self.pictures}
        here = set(self.folder.glob("*.svg"))
        mark = f"<!-- {MARK} from results {self.digest} -->"
        old = {path for path in here & wanted if not path.read_text(encoding="utf-8").startswith(mark)}
        return sorted((wanted - here) | (here - wanted) | old)

    def draw(self) -> list[Path]:
        """Draw all again."""
        return write_pictures(self.pictures, self.folder, f"from results {self.digest}")


def _translated(text: str, chinese: bool) -> str:
    return CHINESE.get(text, text) if chinese else text


def _caption(text: str, chinese: bool) -> str:
    for english, other in _CAPTIONS.items() if chinese else ():
        text = text.replace(english, other)
    return text


def _missing(one: Missing) -> str:
    return f"{', '.join(one.names)} 没有 {', '.join(f'`{verb}`' for verb in one.verbs)}：{one.why}"
