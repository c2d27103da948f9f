"""What the shop does in the background."""

from mtask.contrib.django import options, schedule
from shop.models import Order

try:
    from django.tasks import task
except ImportError:  # Django 5.2
    from django_tasks import task


@task(queue_name="mail")
@options(max_retries=5, retry_backoff=2.0)
def confirm(number):
    """Confirm an order by mail."""
    order = Order.objects.get(number=number)
    print(f"mail to {order.to}: your {order.item}", flush=True)
    Order.objects.filter(number=number).update(mailed=True)
    return f"{order.item} confirmed to {order.to}"


@task
@schedule("0 7 * * *", timezone="Europe/Berlin")
def report():
    """Count the orders, each morning."""
    return f"{Order.objects.count()} orders"
