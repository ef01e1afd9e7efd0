"""What the tests of strategies share: a strategy on a stage, held to what it claims when nothing goes wrong."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bide.lab.actor import Step
from bide.lab.figures import Figures
from bide.lab.judge import Verdict
from bide.lab.stage import Stage, keys_of
from bide.lab.strategy import Flaw, Setting, Strategy, now
from bide.lab.workloads import WORKLOADS

_FAR = 3_600_000
_SOON = 900


def setting_of(strategy: type[Strategy], urls: Mapping[str, str], folder: Path, **more: Any) -> Setting:
    """With names of its own; `more` are further fields."""
    return Setting(
        urls={kind: urls[kind] for kind in strategy.needs}, prefix=f"lab_{secrets.token_hex(5)}", folder=folder, **more
    )


async def keeps_its_word(
    strategy: type[Strategy], urls: Mapping[str, str], folder: Path, *, ahead: int = 300, count: int = 20, **more: Any
) -> Verdict:
    """Tasks `ahead` milliseconds from now fire once each and not early; and whatever of move, cancel and fire now the
    strategy claims does what it says: a moved one fires at its new time alone, a cancelled one never, a fired one soon.
    """
    has = {verb for verb in ("reschedule", "cancel", "fire_now") if verb not in strategy.cannot}
    keys = keys_of(count)
    steps = [Step(0, "schedule", [(key, ahead + 5 * number)]) for number, key in enumerate(keys)]
    # what is to be cancelled is due soon: that it does not fire says something then
    due = {"cancel": ahead + _SOON, "reschedule": _FAR, "fire_now": _FAR}
    steps += [Step(0, "schedule", [(f"{verb}-{number}", due[verb]) for number in range(3)]) for verb in sorted(has)]
    changes = []
    for number in range(3):
        changes += [Step(0, "reschedule", [(f"reschedule-{number}", ahead + 200)])] if "reschedule" in has else []
        changes += [Step(0, "cancel", [(f"cancel-{number}", None)])] if "cancel" in has else []
        changes += [Step(0, "fire_now", [(f"fire_now-{number}", None)])] if "fire_now" in has else []
    async with Stage(strategy, setting_of(strategy, urls, folder, **more)) as stage:
        await stage.start()
        client = await stage.client()
        begin = now() + 50
        stage.sound(await client.play(begin, steps))
        stage.sound(await client.play(now(), changes))
        fires = count + 3 * len(has - {"cancel"})
        end = now() / 1000 + (ahead + max(5 * count + 200, _SOON if "cancel" in has else 0)) / 1000
        await stage.until_fired(fires, by=end + stage.patience)
        await asyncio.sleep(max(0.0, end - time.time()))
        await stage.rest()
        await stage.unharmed()
        verdict = stage.verdict(until=end)
        answers = {(call.verb, call.done) for call in stage.calls()}
    assert answers == {("schedule", True), *((verb, True) for verb in has)}
    assert (verdict.expected, verdict.fired) == (fires, fires), f"lost: {verdict.lost}"
    assert (verdict.duplicated, verdict.early, verdict.revived) == (0, 0, 0)
    return verdict


async def shows(
    strategy: type[Strategy], flaw: Flaw, urls: Mapping[str, str], folder: Path, **more: Any
) -> tuple[str, Figures]:
    """What of the flaw is to be seen when its workload is played in short, and the figures."""
    workload = WORKLOADS[flaw.workload]
    assert not workload.why_not(strategy)
    async with Stage(strategy, setting_of(strategy, urls, folder, **more), relayed=workload.relayed) as stage:
        figures = await workload.play(stage, quick=True)
    return flaw.seen(figures), figures


def named(given: object) -> str | None:
    """The id of a parameter: strategies by name, flaws by workload."""
    if isinstance(given, type) and issubclass(given, Strategy):
        return given.name
    return given.workload if isinstance(given, Flaw) else None
