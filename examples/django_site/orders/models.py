"""What an order is."""

from django.db import models


class Order(models.Model):
    """One order."""

    status = models.CharField(max_length=20, default="unpaid")
