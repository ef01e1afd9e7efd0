"""Which to pick when: a few situations that people come with, each answered by `choose` from the same figures."""

from __future__ import annotations

from typing import NamedTuple

from bide_lab.catalogue import catalogue
from bide_lab.choose import Twice, Wishes, choose, late_words
from bide_lab.report.findings import Findings
from bide_lab.report.tables import EMPTY, Table

_SHOWN = 3
"""Strategies that are named after the pick, at most."""


class Situation(NamedTuple):
    """What somebody needs, in words, and the same as wishes."""

    words: str
    chinese: str
    wishes: Wishes


SITUATIONS = (
    Situation(
        "orders that close after 15 minutes unless they are paid; there is Redis",
        "订单 15 分钟未支付就关闭；有 Redis",
        Wishes(servers=frozenset({"redis"}), several=True),
    ),
    Situation(
        "the same, with a PostgreSQL that holds the orders",
        "同上，订单在 PostgreSQL 里",
        Wishes(servers=frozenset({"postgres"}), several=True),
    ),
    Situation(
        "the same, with a MySQL or MariaDB that holds the orders",
        "同上，订单在 MySQL 或 MariaDB 里",
        Wishes(servers=frozenset({"mysql"}), several=True),
    ),
    Situation("the same on one machine, without a server", "同上，只有一台机器，没有服务器", Wishes()),
    Situation(
        "time-outs of requests within one process, exact to 10 ms, forgotten with it",
        "单进程内的请求超时，精确到 10 ms，随进程消失",
        Wishes(late=0.01, survive=False),
    ),
    Situation(
        "ratings that are given by default after two days; an hour more does no harm, and nothing is moved",
        "两天后自动好评；晚一小时无妨，不需要改时间",
        Wishes(late=3600.0, move=False, servers=frozenset({"mysql"}), several=True),
    ),
    Situation(
        "retries after a fixed delay in a RabbitMQ that is there; never cancelled or moved, done twice at times",
        "已有 RabbitMQ，固定延时的重试；不取消、不改时间，偶尔重复可以接受",
        Wishes(late=5.0, cancel=False, move=False, twice=Twice.YES, servers=frozenset({"rabbitmq"}), several=True),
    ),
)


def picks_table(found: Findings, *, chinese: bool = False) -> Table:
    """A line for each situation: what is picked, what was measured of it, and what else would do."""
    lines = []
    for situation in SITUATIONS:
        fitting = [one.row for one in choose(situation.wishes, found, catalogue().values()).fitting]
        pick, others = fitting[:1], fitting[1 : 1 + _SHOWN]
        lines.append([
            situation.chinese if chinese else situation.words,
            ", ".join(f"{row.name} ({row.title})" for row in pick) or EMPTY,
            ", ".join(late_words(row) for row in pick) or EMPTY,
            ", ".join(row.name for row in others) or EMPTY,
        ])  # fmt: skip
    return Table(["situation", "pick", "measured", "or"], lines)
