"""Limits: how many tasks of a queue, and of each customer, all workers together run at once.

Run workers, as many as you like: mtask-worker examples.limits:app
Set limits and publish:           python -m examples.limits

Both find MongoDB by MTASK_URI. `mtask limit exports --concurrency 3 --key-concurrency 1` sets the same from a shell.
"""

from __future__ import annotations

import asyncio

from mtask import App, Client, TaskSpec

app = App()


@app.task(queue="exports")
async def export(customer: str, part: int) -> str:
    """Export one part of what a customer has."""
    await asyncio.sleep(0.2)  # a slow service that takes three callers, and one for each customer
    return f"{customer}-{part}.zip"


def main() -> None:
    """Set the limits, publish three parts for each of four customers, and tell when each ran."""
    with Client() as client:
        client.limit("exports", concurrency=3, key_concurrency=1)  # returns when all workers go by it
        parts = [(customer, part) for part in range(3) for customer in ("acme", "globex", "hooli", "initech")]
        client.publish_many(
            TaskSpec(export, {"customer": customer, "part": part}, key=f"{customer}/{part}", limit_key=customer)
            for customer, part in parts
        )
        for customer, part in parts:
            run = client.wait(export, f"{customer}/{part}", timeout=60).runs[-1]
            print(f"{run.claim_time:%H:%M:%S.%f} to {run.end_time:%H:%M:%S.%f}: {run.returns}")


if __name__ == "__main__":
    main()
