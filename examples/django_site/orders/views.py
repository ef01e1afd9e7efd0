"""Placing an order, paying it, looking at it.

An order and its timer are one transaction: `app.sync.using(connection)` writes the timer through Django's own
connection. So there is nothing to do in `transaction.on_commit`: if the order is rolled back its timer never was, and
when both are committed, the database itself wakes the workers.
"""

from django.conf import settings
from django.db import connection, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_POST

from orders.models import Order
from orders.tasks import app


class SoldOut(Exception):
    """There is nothing left to be ordered."""


@require_POST
def place(request: HttpRequest) -> HttpResponse:
    try:
        with transaction.atomic():
            order = Order.objects.create()
            app.sync.using(connection).schedule(
                "order.close", order.pk, key=f"{order.pk}", delay=settings.SHOP_CLOSES_AFTER
            )
            if "sold_out" in request.POST:
                raise SoldOut
    except SoldOut:
        return JsonResponse({"error": "sold out"}, status=409)
    return JsonResponse({"number": order.pk}, status=201)


@require_POST
def pay(request: HttpRequest, number: int) -> HttpResponse:
    with transaction.atomic():
        if not Order.objects.filter(pk=number, status="unpaid").update(status="paid"):
            return JsonResponse({"error": "not to be paid any more"}, status=409)
        answer = app.sync.using(connection).cancel("order.close", f"{number}")
    return JsonResponse({"timer_cancelled": answer.ok})


def look(request: HttpRequest, number: int) -> HttpResponse:
    order = Order.objects.filter(pk=number).first()
    return JsonResponse({"status": order.status if order else None})
