"""Schedules: tasks that are published again and again. Workers fire them; each firing exists once, however many run.

Run a worker: mtask-worker examples.schedule:app
Add another:  python -m examples.schedule

Both find MongoDB by MTASK_URI. `mtask schedule list` shows them all.
"""

from __future__ import annotations

from datetime import timedelta

from mtask import App, Client

app = App()


@app.schedule("30 2 * * *", timezone="Europe/Berlin", id="nightly", params={"kind": "sales"}, overlap="skip")
@app.schedule(timedelta(seconds=1), id="pulse", params={"kind": "pulse"}, retain_success=60)
@app.task(queue="reports")
async def report(kind: str) -> str:
    """Write a report. What it declares above is known to the database as soon as a worker runs."""
    return f"{kind} reported"


def main() -> None:
    """Add a schedule that is no part of the code, and tell when it fires."""
    with Client() as client:
        client.add_schedule("digest", report, "0 8 * * mon-fri", {"kind": "digest"}, timezone="America/New_York")
        for firing in client.next_firings("digest", 3):
            print(f"digest fires at {firing:%A %H:%M} UTC")


if __name__ == "__main__":
    main()
