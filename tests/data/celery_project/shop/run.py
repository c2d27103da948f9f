"""Calls tasks in each of the usual ways, and prints what came of it as JSON."""

import json
from datetime import UTC, datetime, timedelta

from celery import chain, chord, group, signature
from celery.exceptions import TimeoutError
from celery.result import AsyncResult

from shop.celery import app
from shop.mail import send_email
from shop.tasks import add, boom, checkout, fetch, give_up, look_up, render, total


def main():
    now = datetime.now(UTC)
    later = add.apply_async((1, 1), countdown=3600)
    results = {
        "delay": add.delay(1, 2),
        "kwargs": add.apply_async(kwargs={"x": 1, "y": 3}),
        "countdown": add.apply_async(args=[1, 4], countdown=0.1),
        "eta": add.apply_async((1, 5), eta=now + timedelta(milliseconds=100)),
        "priority and queue": add.apply_async((1, 6), priority=9, queue="reports"),
        "once": add.apply_async((1, 7), task_id="once"),
        "routed": send_email.delay("a@b.c", cc="d@e.f"),
        "send_task": app.send_task("shop.tasks.add", (1, 8)),
        "signature": signature("shop.tasks.add", args=(1, 9)).delay(),
        "partial": add.s(10).delay(1),
        "chain": chain(add.s(1, 2), add.s(3), total.si([1, 10])).apply_async(),
        "pipe": (add.s(1, 2) | add.s(9)).delay(),
        "group": group(add.s(n, 10) for n in range(3)).apply_async(),
        "chord": chord([add.s(n, n) for n in range(4)])(total.s()),
        "chain with a group": (add.s(1, 1) | group(add.s(1), add.s(2)) | total.s()).delay(),
        "retry": fetch.delay("http://a"),
        "max retries": give_up.delay(),
        "process": render.s("forest").set(time_limit=30).delay(),
        "bound": checkout.delay(7),
    }
    found = {name: result.get(timeout=60) for name, result in results.items()}
    found["once more"] = add.apply_async((5, 5), task_id="once").get(timeout=60)
    found["same id"] = results["bound"].id == found.pop("bound")
    found["another process"] = "forest" in found.pop("process")
    for name, task in (("failed", boom), ("retried in vain", look_up)):
        result = task.delay() if task is boom else task.delay("a")
        found[name] = [str(result.get(timeout=60, propagate=False)), result.failed(), AsyncResult(result.id).state]
    try:
        later.get(timeout=0.1)
    except TimeoutError:
        found["waits"] = later.state
    later.revoke()
    app.control.revoke(later.id, terminate=True)
    found["revoked"] = [later.status, later.ready(), later.successful()]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
