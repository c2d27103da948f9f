"""health: `/healthz` of `mtask web` while many clients send the largest bodies that it takes."""

from __future__ import annotations

import itertools
import time
from collections import Counter

from benchmarks.measuring.flooding import NO_ANSWER, flooded, largest_body
from benchmarks.measuring.server import Server
from benchmarks.measuring.web import Asked, Web, asking
from benchmarks.options import Options
from benchmarks.report.figures import Figure, Result, Target, compared, figure, quantile
from mtask.web.settings import WebSettings

RATE, WINDOW, RUNS = 50.0, 20.0, 1
HEALTH = "/healthz"
#: The longest time, in seconds, for which the address is asked without the bodies.
_ALONE = 5.0
ALONE, BESIDE = "alone", "beside large bodies"
_P99 = Target.at_most(100.0, "value", "ms")
_FAILURES = Target.at_most(0.0, "value", "%")
_ACCEPTED = "200"


def measure(server: Server, options: Options) -> Result:
    """Ask at a steady rate, alone and then beside the bodies."""
    rate, clients = options.rate_or(RATE), options.clients
    asked: dict[str, list[Asked]] = {ALONE: [], BESIDE: []}
    answers: list[Counter[str]] = []
    for run in range(options.runs):
        with server.scratch() as scratch, Web(server, scratch) as web:
            server.say(f"health: run {run + 1} of {options.runs}, alone")
            asked[ALONE].append(_asked(web, rate, min(_ALONE, options.window)))
            server.say(f"health: run {run + 1} of {options.runs}, {clients} clients for {options.window:g} s")
            answers.append(Counter())
            with flooded(server, web, clients, answers[-1]):
                asked[BESIDE].append(_asked(web, rate, options.window))
    times = {side: [one.of([HEALTH]) for one in found] for side, found in asked.items()}
    beside = asked[BESIDE]

    def against_alone(name: str, share: float, target: Target | None = None) -> Figure:
        ours, theirs = ([quantile(one, share) for one in times[side]] for side in (BESIDE, ALONE))
        return compared(f"{HEALTH}, {name}", "ms", ours, theirs, target, against_name=ALONE)

    return Result(
        "health",
        f"`mtask web`: {HEALTH} while {clients} clients send the largest bodies",
        [
            against_alone("p50", 0.5),
            against_alone("p99", 0.99, _P99),
            against_alone("slowest", 1.0),
            figure(
                "answers other than 200", "%", [100 * one.failures.total() / one.count for one in beside], _FAILURES
            ),
            figure("bodies published", "", [float(one[_ACCEPTED]) for one in answers]),
            figure("bodies refused", "", [float(one.total() - one[_ACCEPTED]) for one in answers]),
            figure("CPU of the web process, of one core", "%", [100 * one.cpu / options.window for one in beside]),
        ],
        {"rate": rate, "clients": clients, "window_s": options.window, "runs": options.runs},
        samples={side: [time for one in found for time in one] for side, found in times.items()},
        notes=[
            f"A body is a batch of {len(largest_body(WebSettings())):,} bytes. The clients are one process beside "
            "the server and the database, and share the machine with them.",
            "The time of a request runs from the instant at which it is due.",
            *(f"Answers to bodies: {_told(one)}." for one in answers),
        ],
    )


def _asked(web: Web, rate: float, seconds: float) -> Asked:
    asked = Asked()
    with asking(web, itertools.repeat(HEALTH), rate, asked):
        time.sleep(seconds)
    return asked


def _told(answers: Counter[str]) -> str:
    told = [
        f"{count} of {'connections that were closed' if status == NO_ANSWER else status}"
        for status, count in sorted(answers.items())
    ]
    return ", ".join(told) or "none"
