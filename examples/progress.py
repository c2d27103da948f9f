"""Progress: a handler tells how far it is, and whoever asked for the work follows it as it happens.

Run a worker:        mtask-worker examples.progress:app
Publish and follow:  python -m examples.progress

Both find MongoDB by MTASK_URI. `mtask tail --name render` shows the same in a terminal.
"""

from __future__ import annotations

import time

from mtask import App, Client, Context

app = App()


@app.task
def render(context: Context, film: str, frames: int) -> int:
    """Render a film. A sync handler runs in a thread of the worker, and looks itself whether it is asked to end."""
    for frame in range(frames):
        if context.is_cancelled:
            return frame
        context.progress(frame / frames, f"frame {frame} of {frames}")  # as often as you like: sent once a second
        time.sleep(0.1)  # the work
    context.progress(1, "done")
    return frames


def main() -> None:
    """Publish a film and print what happens to it, until it is done."""
    # The stream is opened first: what happens between the two lines is not missed.
    with Client() as client, client.events(name="render") as happening:
        published = client.publish(render, {"film": "metropolis", "frames": 25})
        for event in happening:
            if event.task_id == published.task_id:
                how_far = "" if event.progress is None else f"{event.progress:.0%} {event.message}"
                print(event.kind, how_far)
                if event.is_end:
                    break


if __name__ == "__main__":
    main()
