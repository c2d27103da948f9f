"""What a handler raised is stored with its run: the path of the class, and the end of the traceback."""

from __future__ import annotations

import pytest

from mtask import App, Fail, Retry
from tests.integration.worker_harness import Working


class Broken(RuntimeError):
    """Raised by a handler."""


def failing_app() -> App:
    """Return an app whose handlers raise what their params say."""
    app = App()

    @app.task(max_retries=3, retry_delay=0)
    async def stumble(errors: list[str], seen: list[int] = []) -> str:  # noqa: B006 it counts the runs
        seen.append(1)
        match errors[len(seen) - 1] if len(seen) <= len(errors) else "":
            case "broken":
                raise Broken("first line\nsecond line")
            case "long":
                raise ValueError("x" * 9000 + " the end")
            case "retry":
                raise Retry(0, "later")
            case "fail":
                raise Fail("enough")
            case "because":
                raise Fail("enough") from Broken("the cause")
        return "well"

    return app


@pytest.mark.parametrize(
    ("errors", "status", "stored"),
    [
        # One failure after another: the newest one is kept, and a run that goes back uncounted drops nothing.
        (["broken", "long", "retry"], "SUCCESS", [None, "builtins.ValueError", None, None]),
        (["long", "broken"], "SUCCESS", [None, f"{__name__}.Broken", None]),
        (["fail"], "FAIL", ["mtask.errors.Fail"]),
        (["broken", "because"], "FAIL", [None, f"{__name__}.Broken"]),
    ],
)
async def test_newest_failed_run_keeps_what_was_raised(
    working: Working, errors: list[str], status: str, stored: list[str | None]
) -> None:
    async with working(failing_app()) as bench:
        await bench.client.publish("stumble", {"errors": errors}, key="k")
        state = await bench.status("stumble:k", status)
        runs = state["worker_states"]
        assert [run["error"]["type"] if "error" in run else None for run in runs] == stored
        (error,) = [run["error"] for run in runs if "error" in run]
        assert len(error["traceback"].encode()) <= 8192
        last = error["traceback"].rstrip().splitlines()[-1]
        if "ValueError" in error["type"]:
            assert last.endswith("x the end")
            assert error["traceback"].startswith("...")
        else:
            assert error["traceback"].startswith("Traceback" if errors[-1] != "because" else f"{__name__}.Broken: the")
            assert "in stumble" in error["traceback"]
        task = await bench.client.get("stumble", "k")
        assert task.error is not None
        assert (task.error.type, task.error.traceback) == (error["type"], error["traceback"])


async def test_run_that_ended_without_an_exception_of_its_handler_has_none(working: Working) -> None:
    app = App()

    @app.task
    async def unfit(number: int) -> object:
        return object()

    async with working(app) as bench:
        await bench.client.publish("unfit", {"number": "7"}, key="not storable")
        state = await bench.status("unfit:not storable", "FAIL")
        assert state["worker_states"][0]["fail_reason"].startswith("the handler's return value cannot be stored")
        assert "error" not in state["worker_states"][0]
        assert (await bench.client.get("unfit", "not storable")).error is None
