"""The pages there are, and what there is to be seen on them."""

from __future__ import annotations

from urllib.parse import quote

from playwright.sync_api import Page, expect
from tests.service.calling import Api

ORDERS = [f"{4700 + number}" for number in range(6)]
"""Keys of waiting tasks of order.close."""
ODD = 'a/b "c" <i>d</i> 订单%'
"""A key that has to be escaped wherever it is shown."""
PAGES = {
    "overview": "/",
    "timeline": "/timeline",
    "timeline of a month": "/timeline?span=month",
    "tasks": "/tasks",
    "recurring tasks": "/recurring",
    "tasks that are dead": "/tasks?state=dead",
    "dead letters": "/dead",
    "topics": "/topics",
    "changes": "/changes",
}
"""Those that are there however much there is."""
OF_TEN = {
    "a task": f"/tasks/order.close/{ORDERS[0]}",
    "a task with an odd name": f"/tasks/post.publish/{quote(ODD, safe='')}",
    "a dead task": "/tasks/payment.notify/n1",
    "a task that is done": "/tasks/coupon.remind/c1",
    "a recurring task": "/recurring/report.send/daily",
    "a paused recurring task": f"/recurring/report.send/{quote(ODD, safe='')}",
    "a task that recurs": "/tasks/report.send/daily",
    "a topic": "/topics/order.close",
    "a paused topic": "/topics/coupon.remind",
    "tasks of a group": "/tasks?group=order-1",
    "dead letters of a topic": "/dead?topic=payment.notify&list=yes",
}
TOPIC, KEY, TO, BY = "Topic", "Key (exact)", "to", "by a duration"
"""What fields are called."""


def fill_ten(api: Api) -> None:
    """Ten tasks: of four topics, in every state, with groups, errors, a payload each."""
    for number, key in enumerate(ORDERS):
        order = {"number": int(key), "customer": "Anna & Bo", "paid": False}
        api.put("order.close", key, delay=f"{number + 1}h", group=f"order-{number % 2}", payload=order)
    api.put("post.publish", ODD, delay="90m", payload="<script>alert(1)</script>")
    for key, error in (("n1", "merchant 17 answered 503"), ("n2", "merchant 4 answered 503")):
        api.put("payment.notify", key, delay="0s", payload={"merchant": key})
        [task] = api.lease("payment.notify")
        assert api.settle(task, "dead", error=error)
    api.put("coupon.remind", "c1", delay="0s", payload={"coupon": 1})
    [task] = api.lease("coupon.remind")
    assert api.settle(task, "done")
    api.done("PUT", "/v1/topics/coupon.remind/pause")


def fill_recurring(api: Api) -> None:
    """Recurring tasks, of which one is paused."""
    odd = f"/v1/topics/report.send/recurring/{quote(ODD, safe='')}"
    daily = {"rule": "30 2 * * mon-fri", "zone": "Europe/Berlin", "jitter": "5m"}
    api.done("PUT", "/v1/topics/report.send/recurring/daily", daily)
    api.done("PUT", odd, {"rule": "every 15m", "overlap": "queue", "window": "1h", "deadline": "10m"})
    api.done("POST", odd, {"do": "pause"})


def titled(page: Page) -> None:
    """One heading of the first level says what the page is."""
    expect(page.locator("h1")).to_have_count(1)
    assert page.locator("h1").inner_text().strip()


def ended(page: Page) -> None:
    """Until a change to many is over."""
    expect(page.locator("[data-is-over]")).to_contain_text("Ended")
