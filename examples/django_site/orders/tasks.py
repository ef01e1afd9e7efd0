"""The tasks of the shop: which there are, and what they do. In the database that Django uses."""

from collections.abc import Callable
from functools import wraps

from django.conf import settings
from django.db import close_old_connections

from bide import Bide, Task
from orders.models import Order

app = Bide(settings.SHOP_DATABASE)


def with_connections(handler: Callable[[Task[int]], None]) -> Callable[[Task[int]], None]:
    """Do for a handler what Django does for a request: it runs in a thread, whose connection may have grown too old.

    Without this a worker would go on with a connection that the database has long ended.
    """

    @wraps(handler)
    def call(task: Task[int]) -> None:
        close_old_connections()
        try:
            handler(task)
        finally:
            close_old_connections()

    return call


@app.handler("order.close", concurrency=4)
@with_connections
def close(task: Task[int]) -> None:
    Order.objects.filter(pk=task.payload, status="unpaid").update(status="closed")
