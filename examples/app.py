"""An app of two handlers, and a service that publishes to it and waits for what comes back.

Run a worker: mtask-worker examples.app:app
Publish:      python -m examples.app

Both find MongoDB by MTASK_URI.
"""

from __future__ import annotations

import asyncio

from mtask import App, Client, Context

app = App()


@app.task(queue="mail", max_retries=5)
async def send_email(context: Context, to: str, subject: str) -> str:
    """Send an email. Async handlers share the worker's event loop."""
    await asyncio.sleep(0.1)  # what talks to the mail server stands here
    return f"{subject!r} sent to {to}, attempt {context.attempt}"


@app.task
def resize_image(path: str, width: int = 800) -> dict[str, int | str]:
    """Resize an image. Sync handlers run in threads."""
    return {"path": path, "width": width}


def main() -> None:
    """Publish two tasks, wait for the email, and print what the handler returned."""
    with Client() as client:
        client.publish(send_email, {"to": "ada@example.com", "subject": "Welcome"}, key="welcome/42")
        client.publish("resize_image", {"path": "cat.png"}, key="cat.png/800", priority=5)
        print(client.wait(send_email, "welcome/42", timeout=30).returns)


if __name__ == "__main__":
    main()
