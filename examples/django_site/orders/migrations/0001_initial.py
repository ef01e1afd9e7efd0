"""The first step."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """The table of orders."""

    initial = True
    operations = [  # noqa: RUF012 - so does Django write it
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("status", models.CharField(default="unpaid", max_length=20)),
            ],
        )
    ]
