"""The findings in Markdown: a file of its own, and the generated parts of docs/strategies.md, in two languages.

The content of a report as blocks, which `document` makes Markdown of, and `page` HTML.

In paragraphs and lines of a list, what stands between backticks is code, and between double asterisks bold; cells of
tables are plain text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TypeAlias, assert_never

from bide_lab.choose import Twice, Wishes, choose, late_words
from bide_lab.journal import BY_NAME, Figures, Measure, Result, figure
from bide_lab.report.charts import Picture, pictures, write_pictures
from bide_lab.report.findings import NOT_ASKED, NOT_SEEN, NOT_WAITED_FOR, Findings, Row, findings
from bide_lab.running import ResultsFile
from bide_lab.strategies import PARTS, Card, Family
from bide_lab.strategy import VERBS

COLUMNS = tuple(
    BY_NAME[name]
    for name in (
        "late-p50", "late-p99", "completed", "idle-cpu", "idle-server-cpu", "idle-trips", "bytes", "server-bytes",
        "trips", "verb-schedule", "verb-reschedule", "verb-cancel", "verb-fire_now",
    )
)  # fmt: skip
"""The columns of a family's table."""
EMPTY = "·"


class Table(NamedTuple):
    """Cells are plain text; the first of each line names what it is about."""

    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    right: frozenset[int] = frozenset()
    """The columns whose values stand to the right."""
    folded: str = ""
    """On a page it is folded away under this title."""
    marked: frozenset[str] = frozenset()
    """The first cells of lines that stand out."""


class Bullets(NamedTuple):
    """A list of short lines."""

    lines: Sequence[str]


class Drawing(NamedTuple):
    """Plain characters whose places matter."""

    text: str


class Part(NamedTuple):
    """A heading, and the blocks below it; on a page they are folded away."""

    title: str
    blocks: Sequence[Block]


class Section(NamedTuple):
    """The blocks on one subject."""

    name: str
    """One word."""
    title: str
    about: str
    blocks: Sequence[Block]


Block: TypeAlias = str | Table | Bullets | Drawing | Part | Picture
"""A string is a paragraph."""


def measure_table(found: Findings, family: Family) -> Table | None:
    """A line for each strategy of the family that has any of the measures, and one of bide's; a column for each."""
    reference = found.reference(family)
    rows = [row for row in found.of(family) if any(row.value(one) is not None for one in COLUMNS)]
    beside = [reference] if rows and reference is not None and reference not in rows else []
    shown = [one for one in COLUMNS if any(row.value(one) is not None for row in rows)]
    if not shown:
        return None
    heads = ["strategy", "", *(_head(one) for one in shown)]
    lines = [
        [row.name, row.strategy.title, *(_or_empty(row.value(measure)) for measure in shown)]
        for row in [*rows, *beside]
    ]
    marked = frozenset(row.name for row in found.bide) if family.name != "bide" else frozenset()
    return Table(heads, lines, frozenset(range(2, len(heads))), marked=marked)


def _head(measure: Measure) -> str:
    unit = measure.unit if measure.unit not in measure.head and measure.unit != "B" else ""
    return f"{measure.head}, {unit}" if unit else measure.head


def _or_empty(value: float | None) -> str:
    return EMPTY if value is None else figure(value)


def counted_table(rows: Iterable[Row]) -> Table | None:
    """Further counts of strategies and workloads: hops, visits, bytes; None if there are none."""
    lines = [[row.name, name, besides] for row in rows for name, seen in row.measured.items()
             if (besides := _besides(seen))]  # fmt: skip
    heads = ["strategy", "workload", "counted besides"]
    return Table(heads, lines, folded="What was counted besides") if lines else None


def flaw_table(rows: Iterable[Row]) -> Table:
    """The flaws of each strategy, and what was seen of them."""
    lines = [[row.name, one.text, one.workload, one.seen or one.why_not] for row in rows for one in row.flaws]
    return Table(["strategy", "known for", "workload", "seen here"], lines)


def ahead(found: Findings) -> str | Table:
    """A line for each measure: bide's best row, and whoever is ahead of that; or that nobody is on any."""
    if not found.better:
        bide = any(row.measured for row in found.bide)
        return "Nowhere in this run." if bide else "bide was not measured in this run, so nothing can be said."
    lines = [
        [one.measure.title, f"{one.measure.words(one.value)} ({one.bide})",
         ", ".join(f"{name} {one.measure.words(value)}" for name, value in one.ahead)]
        for one in found.better
    ]  # fmt: skip
    return Table(["measure", "best of bide", "ahead of it"], lines)


def cell_table(rows: Iterable[Row]) -> Table:
    """Every cell of the results, one line each; times in milliseconds, and what the cell took in seconds."""
    heads = ["strategy", "workload", "fired", "lost", "twice", "early", "late p50", "p99", "most", "took s", "besides"]
    lines = [[row.name, result.workload, *_cell_words(result)] for row in rows for result in row.results.values()]
    return Table(heads, lines, frozenset(range(2, 10)), folded=f"{len(lines)} cells")


def _cell_words(result: Result) -> list[str]:
    """The columns of `cell_table` after the first two."""
    seen, took = result.figures, figure(result.seconds)
    if seen is None:
        return [*[EMPTY] * 7, took, result.why_not]
    if result.workload in NOT_WAITED_FOR:  # what is due after its end was not lost
        return [*[EMPTY] * 7, took, _besides(seen)]
    counts = [EMPTY if one is None or not seen.expected else f"{one:,}"
              for one in (seen.lost, seen.duplicated, seen.early)]  # fmt: skip
    late = [_or_empty(one) for one in (seen.p50, seen.p99, seen.most)]
    return [f"{seen.fired:,} of {seen.expected:,}" if seen.expected else EMPTY, *counts, *late, took, _besides(seen)]


def _besides(seen: Figures) -> str:
    """Everything that has no column: further counts, and firings after a cancel."""
    extra = {"fired after a cancel": float(seen.revived)} if seen.revived else {}
    return ", ".join(f"{name.replace('_', ' ')} {figure(value)}" for name, value in {**extra, **seen.counts}.items())


def missing_verbs(rows: Iterable[Row], *, chinese: bool = False) -> list[str]:
    """Every verb that a strategy has not, those with the same reason and the same strategies together."""
    words = "{names} 没有 {verbs}：{why}" if chinese else "no {verbs} in {names}: {why}"
    names: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for verb in filter(row.strategy.cannot.__contains__, VERBS):
            names.setdefault((row.strategy.cannot[verb], verb), []).append(row.name)
    verbs: dict[tuple[str, str], list[str]] = {}
    for (why, verb), some in names.items():
        verbs.setdefault((why, ", ".join(some)), []).append(f"`{verb}`")
    return [words.format(verbs=", ".join(some), names=them, why=why) for (why, them), some in verbs.items()]


def not_measured(rows: Iterable[Row]) -> list[str]:
    """Each reason, with all strategies of which nothing was measured for it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.why_not:
            found.setdefault(row.why_not, []).append(row.name)
    return [f"{', '.join(names)}: {why}" for why, names in found.items()]


def card_parts(rows: Iterable[Row]) -> list[Part]:
    """The card of each file, with the variants that share it."""
    found: dict[str, tuple[Card, list[str]]] = {}
    for row in rows:
        if row.card is not None:
            found.setdefault(row.card.title, (row.card, []))[1].append(f"`{row.name}`: {row.strategy.title}")
    return [
        Part(title, [Bullets(variants), Drawing(card.drawing), *(f"**{name}.** {card.parts[name]}" for name in PARTS)])
        for title, (card, variants) in found.items()
    ]


_REDIS, _POSTGRES, _MYSQL = (frozenset({kind}) for kind in ("redis", "postgres", "mysql"))
SITUATIONS = (
    ("orders that close after 15 minutes unless they are paid; there is Redis",
     "订单 15 分钟未支付就关闭；有 Redis",
     Wishes(servers=_REDIS, several=True)),
    ("the same, with a PostgreSQL that holds the orders",
     "同上，订单在 PostgreSQL 里",
     Wishes(servers=_POSTGRES, several=True)),
    ("the same, with a MySQL or MariaDB that holds the orders",
     "同上，订单在 MySQL 或 MariaDB 里",
     Wishes(servers=_MYSQL, several=True)),
    ("the same on one machine, without a server", "同上，只有一台机器，没有服务器", Wishes()),
    ("time-outs of requests within one process, exact to 10 ms, forgotten with it",
     "单进程内的请求超时，精确到 10 ms，随进程消失",
     Wishes(late=0.01, survive=False)),
    ("ratings that are given by default after two days; an hour more does no harm, and nothing is moved",
     "两天后自动好评；晚一小时无妨，不需要改时间",
     Wishes(late=3600.0, move=False, servers=_MYSQL, several=True)),
    ("retries after a fixed delay in a RabbitMQ that is there; never cancelled or moved, done twice at times",
     "已有 RabbitMQ，固定延时的重试；不取消、不改时间，偶尔重复可以接受",
     Wishes(late=5.0, cancel=False, move=False, twice=Twice.YES, servers=frozenset({"rabbitmq"}), several=True)),
)  # fmt: skip
"""Needs that people come with, in words, in Chinese, and as wishes."""
_SHOWN = 3
"""Strategies that are named after the pick, at most."""


def picks_table(found: Findings, *, chinese: bool = False) -> Table:
    """A line for each situation: what is picked, what was measured of it, and what else would do."""
    lines = []
    for english, other, wishes in SITUATIONS:
        fitting = [one.row for one in choose(wishes, found).fitting]
        lines.append([
            other if chinese else english,
            ", ".join(f"{row.name} ({row.strategy.title})" for row in fitting[:1]) or EMPTY,
            ", ".join(late_words(row) for row in fitting[:1]) or EMPTY,
            ", ".join(row.name for row in fitting[1 : 1 + _SHOWN]) or EMPTY,
        ])  # fmt: skip
    return Table(["situation", "pick", "measured", "or"], lines)


def ways(results: Sequence[Result]) -> list[str]:
    """A paragraph for each way in which cells were measured; more than one if the file was filled by several runs."""
    found: dict[tuple[bool, float, str, str], list[Result]] = {}
    for one in results:
        found.setdefault((one.quick, one.minute, one.version, machine_words(one)), []).append(one)
    if not found:
        return ["The results file is empty: `bide lab run` fills it."]
    return [_way(*key, some) for key, some in found.items()]


def _way(quick: bool, minute: float, version: str, machine: str, some: Sequence[Result]) -> str:
    measured = sum(one.figures is not None for one in some)
    minutes, seconds = divmod(round(sum(one.seconds for one in some)), 60)
    days = sorted({datetime.fromisoformat(one.at).date().isoformat() for one in some})
    scale = (
        "Nothing is scaled: a minute of a strategy's own periods and levels took a minute." if minute == 60 else
        f"One minute of a strategy's own periods and levels took {figure(minute)} s; the delays of tasks are not "
        "scaled."
    )  # fmt: skip
    return (
        f"A {'quick' if quick else 'full'} run of bide {version} on {machine}: {measured} cells measured, "
        f"{len(some) - measured} not, {f'{minutes} min ' if minutes else ''}{seconds} s of playing, some at a time, "
        f"{days[0] if len(days) == 1 else f'{days[0]} to {days[-1]}'}. {scale}"
    )


def machine_words(result: Result) -> str:
    machine = result.machine
    cpus = machine.get("cpus", 0)
    parts = [f"{cpus} processor{'' if cpus == 1 else 's'}"] if cpus else []
    parts += [str(machine[name]) for name in ("processor", "system") if machine.get(name)]
    parts += [f"Python {machine['python']}"] if machine.get("python") else []
    return ", ".join(parts) or "a machine that was not noted"


def sections(found: Findings, drawn: Sequence[Picture] = (), *, chinese: bool = False) -> list[Section]:
    """The whole report, but for how it was measured: see `ways`. Of a family its pictures, tables, lists and cards."""
    families = []
    for one in found.families:
        rows = found.of(one)
        tables = filter(None, (measure_table(found, one), counted_table(rows)))
        lists = [Bullets(lines) for lines in (not_measured(rows), missing_verbs(rows, chinese=chinese)) if lines]
        pictures = (picture for picture in drawn if picture.family == one)
        families.append(Section(one.name, one.title, one.about, [*pictures, *tables, *lists, *card_parts(rows)]))
    return [
        Section("known", "What each is known for", "What was seen of each flaw in these measurements.",
                [flaw_table(found.rows)]),
        Section("ahead", "Where another is ahead of bide",
                "For each measure the best row of bide's, then every strategy that did better than that.",
                [ahead(found)]),
        Section("picks", "Which to pick when",
                "What `bide lab choose` answers in a few situations: the first is picked, the others would do too. Its "
                "rules go by servers, verbs, precision, flaws and figures; no strategy is named in them.",
                [picks_table(found, chinese=chinese)]),
        *families,
        Section("cells", "Every cell", "Times in milliseconds; what a cell took, in seconds.",
                [cell_table(found.rows)]),
    ]  # fmt: skip


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
