"""Dead letters: grouped by topic and error, and sent again: one, a few, a group, all."""

from __future__ import annotations

from urllib.parse import urlencode

from tests.insight.dying import let_die
from tests.service.calling import Running, running
from tests.service.console.browsing import Browser, over
from tests.service.console.conftest import Visit

from bide.core.records import State


def number(one: Running, topic: str, state: State) -> int:
    return one.run(one.app.tally()).number(topic, state)


def test_the_groups_and_every_way_to_send_them_again(url: str, visit: Visit) -> None:
    with running(url) as one:
        browser = visit(one)
        assert "Nothing is dead." in browser.open("/dead?fresh=yes").words
        one.run(
            let_die(
                one.app,
                "pay",
                {f"p{n:02}": f"HTTP 503 after {n} s" if n < 20 else f"KeyError: 'k{n}'" for n in range(26)},
            )
        )
        one.run(let_die(one.app, "mail", {"m": None}))
        page = browser.open("/dead?fresh=yes")
        assert "27 dead tasks" in page.words
        assert "pay HTTP 503 after # s" in page.words
        assert {value for form in page.forms for name, value in form.fields if name == "verb"} == {"redrive"}
        assert "KeyError: '…'" in page.words
        assert "mail (no error text)" in page.words
        assert page.words.index("HTTP 503") < page.words.index("KeyError"), "the largest first"

        # one
        one_form = next(
            form for form in page.forms if ("scope", "chosen") in form.fields and "p" in dict(form.fields)["ref"]
        )
        page = browser.send([pair for pair in one_form.fields if pair[0] != "csrf"])
        assert browser.where == "/dead?said=redriven"
        assert "redriven" in page.words
        assert number(one, "pay", State.DEAD) == 25
        assert "26 dead tasks" in page.words

        # a few: the ticked tasks in the list behind a group
        page = browser.open("/dead?topic=pay&error=HTTP+503+after+%23+s")
        boxes = [value for _, value in page.form("Redrive the ticked ones").boxes]
        assert len(boxes) in (19, 20)
        browser.press("Redrive the ticked ones", ticked=boxes[:3])
        assert "3 tasks" in browser.page.words
        assert "Each begins a new life: attempt 1, due now" in browser.page.words
        browser.press("Redrive: 3 tasks")
        assert "3 redriven" in over(browser).words

        # a group
        page = browser.open("/dead?" + urlencode({"topic": "pay", "error": "KeyError: '…'"}))
        left = len(page.form("Redrive all of the group").boxes)
        assert left in (5, 6)
        browser.press("Redrive all of the group")
        browser.press(f"Redrive: {left} tasks")
        assert f"{left} redriven" in over(browser).words
        assert "Error" in browser.page.words

        # everything
        dead = one.run(one.app.tally()).number(state=State.DEAD)
        assert dead == 27 - 1 - 3 - left
        browser.open("/dead?fresh=yes")
        browser.press("Redrive everything")
        assert dict(browser.page.form(f"Redrive: {dead} tasks").fields).get("pace") == ""
        browser.press(f"Redrive: {dead} tasks", pace="1000")
        assert f"{dead} redriven" in over(browser).words
        assert one.run(one.app.tally()).number(state=State.DEAD) == 0


def test_many_are_sent_again_at_a_steady_pace(one: Running, browser: Browser) -> None:
    one.run(let_die(one.app, "t", {f"k{n}": "x" for n in range(101)}))
    browser.send([("verb", "redrive"), ("scope", "matching"), ("topic", "t"), ("state", "dead"), ("error", "x")])
    assert dict(browser.page.form("Redrive: 101 tasks").fields)["pace"] == "100"


def test_the_list_behind_a_group_goes_on(one: Running, browser: Browser) -> None:
    one.run(let_die(one.app, "t", {f"k{n:02}": "x" for n in range(12)}))
    page = browser.open("/dead?topic=t&error=x&limit=5")
    seen = [value for _, value in page.form("Redrive the ticked ones").boxes]
    while (following := [link for link in page.hrefs if "cursor=" in link]) != []:
        page = browser.open(following[0])
        seen += [value for _, value in page.form("Redrive the ticked ones").boxes]
    assert len(seen) == len(set(seen)) == 12
    assert "This group has no dead tasks" in browser.open("/dead?topic=t&error=y").words
    assert browser.open("/dead?error=x").words
    assert browser.status == 422
