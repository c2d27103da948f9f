from celery import Celery
from celery.schedules import crontab

app = Celery("shop", include=["shop.tasks"])
app.config_from_object("shop.celeryconfig")
app.autodiscover_tasks(["shop"], related_name="mail")
app.conf.beat_schedule = {
    "nightly report": {
        "task": "shop.tasks.report",
        "schedule": crontab(hour=2, minute=30, day_of_week="mon-fri"),
        "args": ("2026-03-02",),
        "options": {"queue": "reports"},
    },
}


@app.on_after_finalize.connect
def add_hourly(sender, **kwargs):
    from shop.tasks import report

    sender.add_periodic_task(3600.0, report.s("today"), name="hourly report")
