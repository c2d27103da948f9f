import os
import pathlib
import time

from celery import chord, shared_task
from celery.exceptions import MaxRetriesExceededError, Retry

from shop.celery import app
from shop.mail import send_email


@shared_task
def add(x, y):
    return x + y


@app.task(name="shop.sum")
def total(numbers):
    return sum(numbers)


@shared_task(bind=True, max_retries=3, default_retry_delay=30)
def fetch(self, url):
    try:
        if self.request.retries < 2:
            raise ConnectionError(url)
    except ConnectionError as error:
        raise self.retry(exc=error, countdown=0)
    return [url, self.request.retries]


@shared_task(bind=True, max_retries=1)
def give_up(self):
    try:
        self.retry(countdown=0)
    except Retry:
        raise
    except MaxRetriesExceededError:
        return f"gave up after {self.request.retries}"


@app.task(autoretry_for=(KeyError,), retry_backoff=True, retry_backoff_max=1, retry_jitter=False, max_retries=1)
def look_up(name):
    return {}[name]


@app.task(time_limit=60, priority=5)
def render(scene):
    return f"{scene} by {os.getpid()}"


@shared_task
def boom():
    raise ValueError("boom")


@app.task(bind=True)
def checkout(self, order):
    send_email.delay("a@b.c", subject=f"order {order}")
    chord([add.s(order, n) for n in range(3)])(total.s())
    return self.request.id


@app.task
def report(day):
    return day


@app.task
def part(number):
    """The first part waits for a gate, which is shut; a test kills its worker meanwhile."""
    folder = pathlib.Path(os.environ["SHOP_FOLDER"])
    with (folder / "runs").open("a") as file:
        file.write(f"{number}\n")
    while number == 0 and not (folder / "gate").exists():
        time.sleep(0.01)
    return number
