"""Versions of one app, as they are deployed one after the other."""

from __future__ import annotations

from typing import Any

from mtask import App


def former() -> App:
    """Return the app that is deployed first."""
    app = App()

    @app.task
    async def send(to: str) -> str:
        return to

    return app


def later() -> App:
    """Return the app whose handler takes another param."""
    app = App()

    @app.task
    async def send(to: str, subject: str = "hi") -> str:
        return f"{to} {subject}"

    return app


def versioned(version: int = 3, *, is_isolated: bool = False) -> App:
    """Return the app whose handler has a version, with the steps up to it."""
    app = App()
    given: dict[str, Any] = {"isolation": "process"} if is_isolated else {}

    @app.task(version=version, lookup=["to"], **given)
    async def send(to: str, cc: str) -> str:
        return f"{to} {cc}"

    @app.upcast(send, from_version=1)
    def to_2(params: dict[str, Any]) -> dict[str, Any]:
        return {"to": params["to"]}

    if version > 2:

        @app.upcast(send, from_version=2)
        def to_3(params: dict[str, Any]) -> dict[str, Any]:
            return {**params, "cc": params["to"].upper()}

    return app


#: For executors, which import their app.
isolated = versioned(is_isolated=True)
