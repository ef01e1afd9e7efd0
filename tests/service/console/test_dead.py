"""Dead letters: grouped by topic and error, and sent again: one, a few, a group, all."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from tests.servers.keyspace import delete_keys
from tests.service.calling import Api, Running, running
from tests.service.console.forms import HOSTILE, FormBrowser, over
from tests.service.test_access import make

from bide.core.records import Settlement, State, Verdict
from bide.service.callers import Verb

DAY = 86_400_000


@pytest.fixture(params=["memory", "sqlite", "redis"])
def one(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    """An instance on each store."""
    if request.param == "redis":
        server, own = request.getfixturevalue("redis_url"), "t" + secrets.token_hex(5)
        with running(f"{server}?namespace={own}&shards=4") as found:
            yield found
        delete_keys(server, own)
    else:
        with running("memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/tasks.db") as found:
            yield found


@pytest.fixture
def small() -> Iterator[Running]:
    """An instance on a store in memory."""
    with running("memory:") as found:
        yield found


@pytest.fixture
def browser(one: Running) -> Iterator[FormBrowser]:
    api = Api(one.url)
    yield FormBrowser(api)
    api.close()


def let_die(one: Running, topic: str, errors: dict[str, str | None]) -> None:
    """Tasks that died of these errors, by key."""

    async def work() -> None:
        app = one.app
        await app.schedule_many([app.new(topic, None, key=key, delay="0s") for key in errors])
        left = set(errors)
        while left:
            now = app.clock.now()
            leased = await app.store.lease({topic: 1_000}, now=now, until=now + 60_000, holder="w")
            settled = [
                Settlement(topic, one.key, one.token, Verdict.DEAD, keep_until=now + DAY, error=errors[one.key])
                for one in leased.tasks
            ]
            assert all(await app.store.settle(settled, now=app.clock.now()))
            left -= {one.key for one in leased.tasks}

    one.run(work())


def number(one: Running, topic: str, state: State) -> int:
    return one.run(one.app.tally()).number(topic, state)


def test_the_groups_and_every_way_to_send_them_again(one: Running, browser: FormBrowser) -> None:
    assert "Nothing is dead." in browser.open("/dead?fresh=yes").text
    let_die(one, "pay", {f"p{n:02}": f"HTTP 503 after {n} s" if n < 20 else f"KeyError: 'k{n}'" for n in range(26)})
    let_die(one, "mail", {"m": None})
    page = browser.open("/dead?fresh=yes")
    assert "27 dead tasks" in page.text
    assert "pay HTTP 503 after # s" in page.text
    assert "KeyError: '…'" in page.text
    assert "mail (no error text)" in page.text
    assert page.text.index("HTTP 503") < page.text.index("KeyError"), "the largest first"

    # one
    one_form = next(
        form for form in page.forms if ("scope", "chosen") in form.fields and "p" in dict(form.fields)["ref"]
    )
    page = browser.send([pair for pair in one_form.fields if pair[0] != "csrf"])
    assert browser.where == "/dead?said=redriven"
    assert "redriven" in page.text
    assert number(one, "pay", State.DEAD) == 25
    assert "26 dead tasks" in page.text

    # a few: those that are ticked in the list behind a group
    page = browser.open("/dead?topic=pay&error=HTTP+503+after+%23+s")
    boxes = [value for _, value in page.form("Redrive those that are ticked").boxes]
    assert len(boxes) in (19, 20)
    browser.press("Redrive those that are ticked", ticked=boxes[:3])
    assert "3 tasks" in browser.page.text
    assert "Each begins a new life: attempt 1, due now" in browser.page.text
    browser.press("Redrive: 3 tasks")
    assert "3 redriven" in over(browser).text

    # a group
    page = browser.open("/dead?" + urlencode({"topic": "pay", "error": "KeyError: '…'"}))
    left = len(page.form("Redrive all of the group").boxes)
    assert left in (5, 6)
    browser.press("Redrive all of the group")
    browser.press(f"Redrive: {left} tasks")
    assert f"{left} redriven" in over(browser).text
    assert "Error" in browser.page.text

    # everything
    dead = one.run(one.app.tally()).number(state=State.DEAD)
    assert dead == 27 - 1 - 3 - left
    browser.open("/dead?fresh=yes")
    browser.press("Redrive everything")
    assert dict(browser.page.form(f"Redrive: {dead} tasks").fields).get("pace") == ""
    browser.press(f"Redrive: {dead} tasks", pace="1000")
    assert f"{dead} redriven" in over(browser).text
    assert one.run(one.app.tally()).number(state=State.DEAD) == 0


def test_many_are_sent_again_at_a_steady_pace(small: Running) -> None:
    api = Api(small.url)
    browser = FormBrowser(api)
    let_die(small, "t", {f"k{n}": "x" for n in range(101)})
    browser.send([("verb", "redrive"), ("scope", "matching"), ("topic", "t"), ("state", "dead"), ("error", "x")])
    assert dict(browser.page.form("Redrive: 101 tasks").fields)["pace"] == "100"
    api.close()


def test_there_is_nothing_to_cancel(small: Running) -> None:
    api = Api(small.url)
    browser = FormBrowser(api)
    let_die(small, "t", {"k": "x"})
    page = browser.open("/dead?fresh=yes")
    verbs = {value for form in page.forms for name, value in form.fields if name == "verb"}
    assert verbs == {"redrive"}
    api.close()


def test_the_list_behind_a_group_goes_on(small: Running) -> None:
    api = Api(small.url)
    browser = FormBrowser(api)
    let_die(small, "t", {f"k{n:02}": "x" for n in range(12)})
    page = browser.open("/dead?topic=t&error=x&limit=5")
    seen = [value for _, value in page.form("Redrive those that are ticked").boxes]
    while (following := [link for link in page.links if "cursor=" in link]) != []:
        page = browser.open(following[0])
        seen += [value for _, value in page.form("Redrive those that are ticked").boxes]
    assert len(seen) == len(set(seen)) == 12
    assert "No dead task of this group" in browser.open("/dead?topic=t&error=y").text
    assert browser.open("/dead?error=x").text
    assert browser.status == 422
    api.close()


def test_one_sees_what_one_may(small: Running) -> None:
    api = Api(small.url)
    for topic in ("mine.a", "theirs"):
        let_die(small, topic, {"k": f"broken {topic}"})

    async def work() -> str:
        _, header = await make(small.app, "ann", frozenset({Verb.READ}), ("mine.*",))
        return header.split()[1]

    browser = FormBrowser(api)
    browser.log_in(small.run(work()))
    page = browser.open("/dead?fresh=yes")
    assert "1 dead task " in page.text
    assert "mine.a" in page.text
    assert "theirs" not in page.text
    assert [form for form in page.forms if form.action == "/changes"] == []
    browser.open("/dead?topic=theirs")
    assert browser.status == 403
    browser.open("/dead?topic=theirs&error=x")
    assert browser.status == 403
    page = browser.open("/dead?topic=mine.a&list=yes")
    assert "Redrive those that are ticked" not in page.text
    api.close()


def test_what_comes_from_outside_is_inert() -> None:
    pages = []
    for topic, error in (("plain.topic", "plain trouble"), (HOSTILE, HOSTILE)):
        with running("memory:") as one:
            api = Api(one.url)
            browser = FormBrowser(api)
            let_die(one, topic, {f"{topic}.k": error + " 1"})
            texts = [browser.open("/dead?fresh=yes")]
            [link] = {link for link in texts[0].links if "error=" in link}
            texts.append(browser.open(link))
            browser.press("Redrive all of the group")
            texts.append(browser.page)
            pages.append(texts)
            api.close()
    for plain, odd in zip(*pages, strict=True):
        assert odd.tags == plain.tags
        assert odd.attributes == plain.attributes
        assert "\u202e" not in odd.text
