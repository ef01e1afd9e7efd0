"""What is counted, read back from the exposition as Prometheus would read it, also on each real store."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import asdict, replace
from prometheus_client.parser import text_string_to_metric_families
from tests.engine.conftest import stores
from tests.service.instance import served
from tests.waiting import PATIENCE, elapse, in_virtual_time, until

from bide import BadInput, Bide, Dead, Defer, Done, Every, Fixed, Retry, SetupError, StoreFull, StoreUnavailable, Task
from bide.core.instants import At
from bide.core.records import Filter, Lease, OutcomeKind, Page, State
from bide.core.retry import policy
from bide.engine.delivery.long_poll import LongPoll
from bide.ports import Features, Policy, Store, Wakes
from bide.service.metrics import OPERATIONS, BoundedLabels, Metrics
from bide.stores.memory import MemoryStore
from bide.testing.faults import FaultyStore
from bide.testing.virtual import VirtualLoop

Sample = tuple[str, frozenset[tuple[str, str]]]


class Measured:
    """An app, its metrics, and what Prometheus would read."""

    def __init__(self, app: Bide | None = None, **options: Any) -> None:
        self.memory = MemoryStore()
        self.store = FaultyStore(self.memory)
        self.app = app or Bide(self.store, keep_cancelled="0s")
        self.metrics = Metrics(self.app, **{"tally_every": 0, "patience": PATIENCE, **options})
        self.samples: dict[Sample, float] = {}

    async def scrape(self) -> None:
        text, content_type = await self.metrics.exposition()
        assert content_type.startswith("text/plain; version=")
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
        }

    async def overdue(self, topic: str, key: str, by: int) -> None:
        """A task that nobody has taken for so many milliseconds."""
        await self.memory.add([self.app.new(topic, key=key, delay="0s")], now=self.app.clock.now() - by)

    def errors(self) -> list[Sample]:
        """Of the store."""
        return [sample for sample, value in self.samples.items() if sample[0] == "bide_store_errors_total" and value]

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.samples.get((name, frozenset(labels.items())))


@pytest.fixture
async def measured() -> AsyncIterator[Measured]:
    made = Measured()
    async with made.app:
        yield made


async def until_empty(app: Bide) -> None:
    async with app.worker() as worker:
        await worker.until_empty()


@in_virtual_time
async def test_tasks_by_topic_and_state_and_what_is_due(loop: VirtualLoop) -> None:
    measured = Measured()
    async with measured.app as app:
        await app.schedule("post", key="later", delay="1h")
        await measured.overdue("post", "overdue", 90_000)
        await app.schedule("mail", key="leased", delay="0s")
        now = app.clock.now()
        await app.store.lease({"mail": 1}, now=now, until=now + 60_000, holder="me")
        await measured.scrape()
        assert measured("bide_store_up") == 1
        assert measured("bide_tasks", topic="post", state="waiting") == 2
        assert measured("bide_tasks", topic="mail", state="leased") == 1
        assert measured("bide_tasks", topic="mail", state="waiting") == 0
        assert measured("bide_tasks_due", topic="post") == 1
        assert measured("bide_tasks_due", topic="mail") == 0
        oldest = measured("bide_oldest_due_seconds", topic="post")
        assert oldest is not None
        assert 90 <= oldest < 3_600, "seconds"
        assert measured("bide_oldest_due_seconds", topic="mail") == 0
        assert measured("bide_counts_at_limit") == 0
        assert measured("bide_clock_skew_seconds") is None, "a memory store has no clock of its own"

        await app.cancel("post", "later")
        await app.cancel("post", "overdue")
        await measured.scrape()
        assert measured("bide_tasks", topic="post", state="waiting") == 0, "a topic that is known stays, at 0"


async def test_lateness_outcomes_and_wakes_of_a_worker(measured: Measured) -> None:
    app = measured.app
    ends: list[Any] = [None, Retry(delay="0s"), Defer("0s"), Dead("no")]

    @app.handler("post", retry=Fixed("1ms", tries=3))
    async def post(task: Task[Any]) -> Any:
        return ends.pop(0)

    await measured.overdue("post", "late", 5_000_000)
    await until_empty(app)
    await post.schedule(None, key="soon", delay="0s")
    await until_empty(app)
    await measured.scrape()
    assert measured("bide_lateness_seconds_count", topic="post") == 4
    assert measured("bide_lateness_seconds_bucket", topic="post", le="3600.0") == 3
    assert measured("bide_lateness_seconds_bucket", topic="post", le="+Inf") == 4
    for verdict in ("done", "retry", "defer", "dead"):
        assert measured("bide_outcomes_total", topic="post", verdict=verdict) == 1
    assert measured("bide_tasks", topic="post", state="dead") == 1
    assert measured("bide_wakeups_missed_total") == 0
    assert {name for name, _ in measured.samples} >= {"bide_notifications_total", "bide_wakeups_total"}


async def test_the_deliveries_of_workers_over_http_count_too() -> None:
    async with served("memory:") as service:
        app = Bide(service.url)

        @app.handler("post", retry="never")
        async def post(task: Task[Any]) -> Any:
            return Dead("no") if task.key == "bad" else None

        async with app:
            await app.schedule_many([post.new(None, key=key, delay="0s") for key in ("a", "b", "bad")])
            await until_empty(app)
        text, _ = await service.serving.metrics.exposition()
        shown = text.decode()
    assert 'bide_lateness_seconds_count{topic="post"} 3.0' in shown
    assert 'bide_outcomes_total{topic="post",verdict="done"} 2.0' in shown
    assert 'bide_outcomes_total{topic="post",verdict="dead"} 1.0' in shown


async def test_what_is_handed_out_to_others_counts_too(measured: Measured) -> None:
    app = measured.app
    await app.schedule("post", key="a", delay="0s")
    now = app.clock.now()
    leased = await app.store.lease({"post": 1}, now=now, until=now + 60_000, holder="me")
    measured.metrics.started(leased.tasks[0], leased.tasks[0].planned_at + 20)
    measured.metrics.started(leased.tasks[0], leased.tasks[0].planned_at - 1)
    await measured.scrape()
    assert measured("bide_lateness_seconds_bucket", topic="post", le="0.01") == 1, "never below 0"
    assert measured("bide_lateness_seconds_bucket", topic="post", le="0.025") == 2
    assert measured("bide_lateness_seconds_sum", topic="post") == pytest.approx(0.02)


async def test_outcomes_of_consumers_elsewhere_count_once_the_store_has_them(measured: Measured) -> None:
    app = measured.app
    long_poll = LongPoll(app, settled=measured.metrics.settled, policy_of=lambda _: Policy(policy(None)))
    for key in "abc":
        await app.schedule("post", key=key, delay="0s")
    now = app.clock.now()
    leased = await app.store.lease({"post": 3}, now=now, until=now + 60_000, holder="me")
    first, second, third = (Lease(one.topic, one.key, one.token) for one in leased.tasks)
    late = Lease(third.topic, third.key, third.token - 1)
    assert await long_poll.settle([(first, Done()), (second, Retry()), (late, Done())], who="me") == [True, True, False]
    await measured.scrape()
    assert measured("bide_outcomes_total", topic="post", verdict="done") == 1
    assert measured("bide_outcomes_total", topic="post", verdict="retry") == 1


async def test_store_calls_are_timed_and_their_errors_counted(measured: Measured) -> None:
    app = measured.app
    await measured.scrape()
    assert measured("bide_store_errors_total", operation="add", error="StoreFull") == 0
    await app.schedule("post", key="a", delay="1h")
    await app.get("post", "a")
    for error in (StoreFull("no room"), RuntimeError("a defect")):
        measured.store.fault = lambda point, error=error: error if point == "add:before" else None  # type: ignore[misc]
        with pytest.raises(type(error)):
            await app.schedule("post", key="b", delay="1h")
    measured.store.fault = lambda _: None
    await measured.scrape()
    assert measured("bide_store_call_seconds_count", operation="add") == 3
    assert measured("bide_store_call_seconds_count", operation="get") == 3, "and a look by each scrape"
    assert measured("bide_store_errors_total", operation="add", error="StoreFull") == 1
    assert measured("bide_store_errors_total", operation="add", error="defect") == 1
    assert measured("bide_store_errors_total", operation="get", error="StoreUnavailable") == 0


async def test_a_mistake_of_the_caller_is_no_error_of_the_store(measured: Measured) -> None:
    with pytest.raises(BadInput):
        await measured.app.store.find(Filter(), Page(cursor="not one of ours"))
    await measured.scrape()
    assert not measured.errors()


async def test_a_store_that_is_opened_again_is_timed_once() -> None:
    app = Bide("memory:")
    made = Measured(app)
    for _ in range(3):
        async with app:
            await app.schedule("post", key="a", delay="1h")
            await made.scrape()
    assert made("bide_store_call_seconds_count", operation="add") == 3


@pytest.mark.parametrize("what", ["dead", "slow", "defect"])
@in_virtual_time
async def test_a_store_that_is_away_costs_its_counts_and_nothing_else(loop: VirtualLoop, what: str) -> None:
    made = Measured()
    async with made.app as app:
        await app.schedule("post", key="a", delay="1h")
        await made.scrape()
        assert made("bide_tasks", topic="post", state="waiting") == 1
        if what == "slow":
            made.store.latency = lambda _: 3_600.0
        else:
            error = StoreUnavailable("away") if what == "dead" else RuntimeError("a defect")
            made.store.fault = lambda point: error if point.startswith(("get:", "tally:")) else None
        await made.scrape()
        assert made("bide_store_up") == 0
        assert made("bide_tasks", topic="post", state="waiting") is None, "old counts are not passed off as new"
        assert made("bide_store_call_seconds_count", operation="add") == 1
        made.store.fault, made.store.latency = lambda _: None, None
        await made.scrape()
        assert made("bide_store_up") == 1
        assert made("bide_tasks", topic="post", state="waiting") == 1
    await made.scrape()
    assert made("bide_store_up") == 0, "the app is closed"


@in_virtual_time
async def test_a_store_that_answers_and_takes_too_long_to_count_is_up_and_its_last_counts_stay(
    loop: VirtualLoop,
) -> None:
    made = Measured()
    async with made.app as app:
        await app.schedule("post", key="a", delay="1h")
        await made.scrape()
        assert (made("bide_store_counted"), made("bide_counts_age_seconds")) == (1, 0)
        made.store.latency = lambda operation: 60.0 if operation == "tally" else 0.0
        await elapse(30)
        await made.scrape()
        assert (made("bide_store_up"), made("bide_store_counted")) == (1, 0)
        assert made("bide_tasks", topic="post", state="waiting") == 1
        assert made("bide_counts_age_seconds") == 30 + PATIENCE
        await elapse(60)
        await made.scrape()
        assert made("bide_store_counted") == 1, "the count went on, and is the next one's"


async def test_topics_with_a_route_keep_their_series_and_others_make_room() -> None:
    clock = [0.0]
    few = BoundedLabels(3, clock=lambda: clock[0])
    few.reserve("order.close")
    assert [few.label(value) for value in ("a", "b", "c")] == ["a", "b", "other"]
    clock[0] = 3_599
    assert (few.label("b"), few.free()) == ("b", [])
    clock[0] = 3_600
    assert (few.free(), few.label("c"), few.given("order.close"), few.given("a")) == (
        ["a"], "c", "order.close", "other",
    )  # fmt: skip


@in_virtual_time
async def test_a_topic_that_is_gone_for_an_hour_has_no_series(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Measured(topics=1)
    async with made.app as app:
        await app.schedule("old", key="a", delay="1h")
        made.metrics.settled("old", OutcomeKind.DONE)
        await app.schedule("new", key="a", delay="1h")
        await app.schedule("new", key="b", delay="1h")
        await made.scrape()
        assert (made("bide_topics_in_other"), made("bide_tasks", topic="old", state="waiting")) == (1, 1)
        await app.cancel("old", "a")
        monkeypatch.setitem(made.metrics._topics.known, "old", -3_600.0)
        monkeypatch.setattr(made.metrics._topics, "_clock", lambda: 1.0)
        await made.scrape()
        await made.scrape()
        assert made("bide_tasks", topic="new", state="waiting") == 2
        assert made("bide_outcomes_total", topic="old", verdict="done") is None


async def test_a_paused_topic_does_not_stand_for_all_others() -> None:
    made = Measured(topics=0)
    async with made.app as app:
        for topic in ("paused", "due"):
            await app.schedule(topic, key="a", delay="0s")
        await app.pause("paused")
        await made.scrape()
    assert [made(f"bide_{name}", topic="other") for name in ("topic_paused", "tasks_due")] == [None, 1]


async def test_many_scrapes_are_one_tally() -> None:
    made = Measured(tally_every=60)
    async with made.app:
        await asyncio.gather(*(made.metrics.exposition() for _ in range(20)))
        await made.metrics.exposition()
        assert made.store.calls["tally"] == 1


async def test_the_number_of_series_is_bounded() -> None:
    made = Measured(topics=3)
    async with made.app as app:
        for number in range(20):
            await app.schedule(f"t{number:02}", key="a", delay="0s")
        for number in range(5):
            made.metrics.webhook(Result(f"w{number}", 200, 0.1, "done"))
        for number in range(300):
            made.metrics.request(f"call {number}", 200, 0.1)
        await made.scrape()
    topics = {dict(labels)["topic"] for name, labels in made.samples if name == "bide_tasks"}
    assert topics == {"other", "w0", "w1", "w2"}
    assert sum(value for (name, labels), value in made.samples.items() if name == "bide_tasks_due") == 20
    calls = {dict(labels)["call"] for name, labels in made.samples if name == "bide_http_requests_total"}
    assert len(calls) == 101
    assert made("bide_http_requests_total", call="other", status="200") == 200


class Result(Struct):
    topic: str
    status: int | None
    seconds: float
    outcome: str


async def test_webhooks_requests_polls_and_streams(measured: Measured) -> None:
    metrics = measured.metrics
    ended = {204: "done", 503: "retry", None: "retry", 410: "dead", 999: "strange"}
    for code, outcome in [*ended.items(), (None, "defer")]:
        metrics.webhook(Result("order.close", code, 0.03, outcome))
    metrics.request("schedule", 201, 0.002)
    metrics.request("schedule", 7, 0.002)
    metrics.polls, metrics.streams = lambda: 2, lambda: 4
    await measured.scrape()
    assert measured("bide_lease_polls_open") == 2
    assert measured("bide_event_streams_open") == 4
    for status, outcome in (("2xx", "done"), ("5xx", "retry"), ("none", "retry"), ("4xx", "dead"), ("other", "other")):
        assert measured("bide_webhook_results_total", topic="order.close", status=status, outcome=outcome) == 1
    assert measured("bide_webhook_seconds_bucket", topic="order.close", le="0.05") == 5
    assert measured("bide_webhook_seconds_bucket", topic="order.close", le="0.025") == 0
    assert measured("bide_http_requests_total", call="schedule", status="201") == 1
    assert measured("bide_http_requests_total", call="schedule", status="other") == 1
    assert measured("bide_http_request_seconds_count", call="schedule") == 2
    metrics.polls, metrics.streams = lambda: 0, lambda: 3
    await measured.scrape()
    assert (measured("bide_lease_polls_open"), measured("bide_event_streams_open")) == (0, 3)


async def test_occurrences_that_did_not_run_are_counted(measured: Measured) -> None:
    app = measured.app

    @app.handler("tick")
    async def tick(task: Task[Any]) -> None: ...

    new, now = app.recurring.new("tick", Every("1h"), catch_up="none"), app.clock.now()
    await measured.memory.add([replace(new, due=At(now - now % 3_600_000 - 4 * 3_600_000))], now=now - 5 * 3_600_000)
    async with app.worker() as worker:
        await until(lambda: worker.stats.deferred == 1, "the occurrences to be left out")
    await measured.scrape()
    assert measured("bide_dropped_occurrences_total", topic="tick", reason="late") == 5
    assert measured("bide_outcomes_total", topic="tick", verdict="done") is None


async def test_wakes_and_dropped_events_are_added_up(measured: Measured) -> None:
    measured.metrics.working(Wakes(notifications=2, by_notification=1, by_alarm=3, by_cap=4, missed=1))
    await measured.scrape()
    assert measured("bide_notification_age_seconds") is None
    measured.metrics.working(Wakes(notifications=1, heard_at=0.0, by_cap=1))
    measured.app.recorder.dropped = 5
    await measured.scrape()
    assert measured("bide_notifications_total") == 3
    assert [measured("bide_wakeups_total", reason=reason) for reason in ("notification", "alarm", "cap")] == [1, 3, 5]
    assert measured("bide_wakeups_missed_total") == 1
    age = measured("bide_notification_age_seconds")
    assert age is not None
    assert age > 0
    assert measured("bide_events_dropped_total") == 5
    await measured.app.close()
    await measured.app.open()
    measured.app.recorder.dropped = 1
    await measured.scrape()
    assert measured("bide_events_dropped_total") == 6, "a counter never falls"


class Timed(MemoryStore):
    """A store whose clock is 90 s ahead."""

    @property
    def features(self) -> Features:
        return replace(super().features, clock=self)

    async def time(self) -> int:
        return time.time_ns() // 1_000_000 + 90_000

    def clock(self) -> None:
        return None


async def test_the_skew_of_the_stores_clock() -> None:
    made = Measured(Bide(Timed()))
    async with made.app:
        await made.scrape()
    skew = made("bide_clock_skew_seconds")
    assert skew is not None
    assert -150 < skew < -30, "a machine that stands still between the two clocks makes them differ"


@pytest.mark.parametrize("name", ['quo"te', "back\\slash", "uni-ü-☃", "a,b{c=d} 1", "sp ace"])
async def test_topics_of_any_form_are_labels(measured: Measured, name: str) -> None:
    await measured.app.schedule(name, key="a", delay="1h")
    await measured.scrape()
    assert measured("bide_tasks", topic=name, state=State.WAITING.value) == 1


async def test_metrics_are_made_before_the_app_is_opened() -> None:
    async with Bide("memory:") as app:
        with pytest.raises(SetupError, match="before the app is opened"):
            Metrics(app)


def test_the_documented_table_is_what_is_counted(root: Path) -> None:
    lines = ["| name | kind | labels | what it is |", "|---|---|---|---|"]
    for family in Metrics(Bide("memory:")).families:
        labels = ", ".join(f"`{label}`" for label in family.labels) or "none"
        lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.about} |")
    table = "\n".join(lines) + "\n"
    text = (root / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert table in text, f"docs/metrics.md must have this table:\n{table}"


def test_names_follow_the_conventions() -> None:
    for family in Metrics(Bide("memory:")).families:
        assert re.fullmatch(r"bide_[a-z_]+", family.name)
        assert (family.kind == "counter") == family.name.endswith("_total")
        assert family.kind != "histogram" or family.name.endswith("_seconds")
        assert family.about.endswith(".")


def abilities(store: Store) -> list[str]:
    """The names of its features."""
    return [name for name, feature in asdict(store.features).items() if feature is not None]


@stores("sqlite", "redis", "postgres", "mysql")
async def test_each_timed_store_can_do_what_it_could(store_url: str) -> None:
    """Each of its calls is counted once."""
    async with Bide(store_url) as plain:
        could = abilities(plain.store)
    read = Measured(app := Bide(store_url))
    async with app:
        assert abilities(app.store) == could
        await app.schedule_many([app.new("post", None, key=key, delay="1h") for key in "ab"])
        await app.fire_now("post", "a")
        await app.events()
        await read.scrape()
        for operation in ("add", "change"):
            assert read("bide_store_call_seconds_count", operation=operation) == 1, operation
        timed = {dict(labels)["operation"] for name, labels in read.samples if name == "bide_store_call_seconds_count"}
        assert timed == set(OPERATIONS)
        assert (read("bide_clock_skew_seconds") is not None) is (app.store.features.clock is not None)
        assert not read.errors()
