"""One task for several workers: it is done when two of them have done it, each on its own host.

Run two workers: mtask-worker examples.several_workers:app --worker-id berlin
                 mtask-worker examples.several_workers:app --worker-id oslo
Publish:         python -m examples.several_workers

All find MongoDB by MTASK_URI.
"""

from __future__ import annotations

from mtask import App, Client, Context

app = App()


@app.task(concurrent_worker_cnt=2, retry_scope="worker")
async def warm_cache(context: Context, release: str) -> str:
    """Load a release into this host's cache. With retry_scope "worker" each host has retries of its own."""
    return f"{release} cached on {context.worker_id}"


def main() -> None:
    """Have any two workers do it, and one that is named."""
    with Client() as client:
        client.publish(warm_cache, {"release": "v7"}, key="v7")
        client.publish(
            warm_cache, {"release": "v8"}, key="v8/oslo", concurrent_worker_cnt=1, specific_worker_ids=["oslo"]
        )
        for key in ("v7", "v8/oslo"):
            task = client.wait(warm_cache, key, timeout=60)
            print(key, task.status, sorted(run.returns for run in task.runs))


if __name__ == "__main__":
    main()
