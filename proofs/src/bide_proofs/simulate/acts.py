"""What is done in a simulation: by handlers, as the payloads of their tasks say, and by clients, as the plan does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from bide.core.answers import Answer
from bide.core.errors import StoreError
from bide.core.instants import Millis
from bide.core.outcomes import Dead, Defer, Done, Retry
from bide.core.records import Token
from bide.core.tasks import Task
from bide.testing.history.recording import RecordedClient
from bide_proofs.misuse import misbehave
from bide_proofs.simulate.plan import Ask

TIMEOUT: Millis = 3_000
_MOST_AGAIN = 3
"""So many times a task of one key starts its next life by itself."""


async def behave(
    task: Task[Any],
    client: RecordedClient,
    again: Callable[[Task[Any]], int],
    delivery: int,
    lease: Millis,
    die: Callable[[], bool],
    block: Callable[[Millis], None],
) -> Any:
    """What a handler does with `task` at this delivery of its life: the word of its payload, with its milliseconds."""
    does = task.payload["does"]
    word, _, number = does[min(delivery, len(does)) - 1].partition(":")
    pause = timedelta(milliseconds=int(number or 0))
    seconds = pause / timedelta(seconds=1)
    app, topic, key = client.app, task.topic, task.key
    if word == "ok":
        if seconds:
            await asyncio.sleep(seconds)
    elif word == "fail":
        await asyncio.sleep(0.01)
        raise OSError("it fails")
    elif word == "retry":
        raise Retry("not now", delay=pause)
    elif word == "defer":
        raise Defer(pause)
    elif word == "dead":
        raise Dead("it will never work")
    elif word == "hang":
        await asyncio.sleep(TIMEOUT / 1000 + 30)
    elif word == "stubborn":
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(TIMEOUT / 1000 + 2)
        await asyncio.sleep(1)
    elif word == "long":
        await asyncio.sleep(min(TIMEOUT, 1.5 * lease) / 1000 - 0.05)
    elif word == "kill":
        if die():
            await asyncio.get_running_loop().create_future()
    elif word == "block":
        block(lease + lease // 2)
        await asyncio.sleep(0)
    elif word == "odd":
        await asyncio.sleep(0.01)
        return misbehave(int(number))
    elif word == "again":
        if again(task) <= _MOST_AGAIN:
            return Done(again_in=pause)
    else:
        with suppress(StoreError):
            if word == "self":
                await client.schedule(app.new(topic, {"does": ["ok"]}, key=key, delay=pause))
            elif word == "next":
                new = app.new(topic, {"does": ["ok"]}, key=f"{key}n", delay=pause, on_conflict="keep")
                await client.schedule(new)
            else:
                assert word == "cancel"
                await client.cancel(topic, key)
    return None


async def answers(client: RecordedClient, step: Ask, token: Token | None) -> Sequence[Answer]:
    """Ask what `step` says. Raises StoreError."""
    topic, key, delay = step.topic, step.keys[0], timedelta(milliseconds=step.delay)
    if step.verb in ("schedule", "many"):
        deadline = None if step.deadline is None else timedelta(milliseconds=max(step.deadline, step.delay + 2))
        how: dict[str, Any] = {"group": step.group, "on_conflict": step.conflict, "deadline": deadline}
        new = [
            # of several each is due before the one ahead of it
            client.new(topic, {"does": step.does}, key=one, delay=delay // place, **how)
            for place, one in enumerate(step.keys, 1)
        ]
        return [await client.schedule(new[0])] if len(new) == 1 else await client.schedule_many(new)
    if step.verb == "move":
        return [await client.reschedule(topic, key, delay=delay, if_token=token)]
    if step.verb == "fire":
        return [await client.fire_now(topic, key, if_token=token)]
    if step.verb == "cancel":
        return [await client.cancel(topic, key, if_token=token)]
    if step.verb == "redrive":
        return [await client.redrive(topic, key, delay=delay, if_token=token)]
    if step.verb == "shift":
        return await client.shift(step.group or "", delay)
    if step.verb == "cancel_group":
        return await client.cancel_group(step.group or "")
    assert step.verb == "get"
    await client.get(topic, key)
    return []
