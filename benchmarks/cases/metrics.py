"""metrics: scrapes of `mtask metrics` in a large collection; what they cost the server and the process."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.measuring import variety
from benchmarks.measuring.counters import Counters
from benchmarks.measuring.scraping import Exporter, Scrape
from benchmarks.measuring.server import NotMeasured, Scratch, Server
from benchmarks.options import Options
from benchmarks.report.figures import Figure, Result, Spread, Target, figure, quantile

#: Scrapes a second: a hundred a minute. And the seconds for which they are watched, in each run.
RATE, WINDOW, RUNS = 100 / 60, 300.0, 1
#: The server is idle when it takes less than this share of a core during so many seconds: what was inserted is written.
_IDLE_SHARE, _IDLE_SECONDS, _IDLE_PATIENCE = 0.02, 10.0, 300.0
#: The number of scrapes between two counts whose documents are counted.
_BETWEEN = 10
#: A round of counts that lasts longer than this many seconds after the window is not waited for.
_PATIENCE = 900.0


@dataclass(frozen=True, slots=True)
class Watched:
    """What scrapes took during whole rounds: each begins with a count of all tasks."""

    seconds: float
    scrapes: list[Scrape]
    counts: int
    server_cpu: float  #: seconds
    process_cpu: float  #: seconds
    docs_between: float  #: documents that a scrape examines which counts nothing


def measure(server: Server, options: Options) -> Result:
    """Fill a collection; in each run, watch the server at rest, then while it is scraped."""
    rate, found, rests = options.rate_or(RATE), list[Watched](), list[float]()
    with server.scratch() as scratch:
        server.say(f"metrics: inserting {options.finished + options.delayed:,} tasks")
        variety.fill(scratch, options.finished, options.delayed)
        with Exporter(server, scratch) as exporter:
            exporter.scrape()
            server.say("metrics: waiting until the server has written them")
            _wait_idle(server)
            for run in range(options.runs):
                server.say(f"metrics: run {run + 1} of {options.runs}, at rest")
                rests.append(_rest(server, options.window / 5))
                server.say(f"metrics: run {run + 1} of {options.runs}, scraping for {options.window:g} s or more")
                found.append(_watch(server, scratch, exporter, rate, options.window))
    own = [100 * one.process_cpu / one.seconds for one in found]
    above = [100 * (one.server_cpu / one.seconds - rest) for one, rest in zip(found, rests, strict=True)]
    both = [mine + its for mine, its in zip(own, above, strict=True)]
    times = [[1000 * scrape.seconds for scrape in one.scrapes] for one in found]
    return Result(
        "metrics",
        f"{60 * rate:g} scrapes a minute of {options.finished + options.delayed:,} tasks",
        [
            _figure("CPU of both, of one core", both, Target.at_most(1.0, "value", "%")),
            _figure("CPU of mtask metrics, of one core", own),
            _figure("CPU of the server above its rest, of one core", above),
            _figure("CPU of the server at rest, of one core", [100 * rest for rest in rests]),
            figure("counts of all tasks", "", [float(one.counts) for one in found]),
            figure("seconds of a round", "s", [one.seconds / one.counts for one in found]),
            figure("documents that a scrape examines between two counts", "", [one.docs_between for one in found]),
            figure("time of a scrape, median", "ms", [quantile(one, 0.5) for one in times]),
            figure("time of a scrape, longest: it counts", "ms", [max(one) for one in times]),
            figure("size of an answer", "KB", [one.scrapes[-1].size / 1000 for one in found]),
        ],
        {
            "finished": options.finished,
            "delayed": options.delayed,
            "rate": round(rate, 3),
            "window_s": options.window,
            "runs": options.runs,
        },
        notes=["Watched are whole rounds: each begins with a count of all tasks, and ends before the next one."],
    )


def _figure(name: str, values: list[float], target: Target | None = None) -> Figure:
    return Figure(name, "%", Spread.of(values), target=target)


def _rest(server: Server, seconds: float) -> float:
    """Return the part of one core that the server takes while this process waits."""
    before, began = server.counters(), time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    return (server.counters() - before - server.own(0)).cpu / took


def _wait_idle(server: Server) -> None:
    end = time.monotonic() + _IDLE_PATIENCE
    while _rest(server, _IDLE_SECONDS) > _IDLE_SHARE:
        if time.monotonic() > end:
            raise NotMeasured("the server does not come to rest.")


def _watch(server: Server, scratch: Scratch, exporter: Exporter, rate: float, window: float) -> Watched:
    """Scrape during whole rounds, for the window and until the round of its end is over."""
    # The next scrape counts, so a round begins now.
    scratch.database["metrics"].update_one({"_id": "counts"}, {"$unset": {"fresh_until": 1}})
    scrapes, counts, readings, docs = list[Scrape](), 0, 1, list[Counters]()
    first, own, began = server.counters(), exporter.cpu(), time.monotonic()
    while True:
        elapsed = time.monotonic() - began
        is_late = elapsed > window
        before = (server.counters(), exporter.cpu(), elapsed) if is_late else None
        readings += is_late
        scrapes.append(exporter.scrape())
        if _has_counted(scrapes):
            if before is not None:  # this scrape belongs to the next round
                last, process, seconds = before
                break
            counts += 1
        if len(scrapes) in (1, 1 + _BETWEEN):
            docs.append(server.counters())
            readings += 1
        if elapsed > window + _PATIENCE:
            raise NotMeasured("the tasks were not counted anew.")
        time.sleep(max(0.0, began + len(scrapes) / rate - time.monotonic()))
    between = (docs[1] - docs[0]).docs_examined / _BETWEEN
    server_cpu = (last - first).cpu - (server.own(0) * readings).cpu
    return Watched(seconds, scrapes[:-1], counts, server_cpu, process - own, between)


def _has_counted(scrapes: list[Scrape]) -> bool:
    """Whether the last scrape has counted all tasks: the counts are younger than those before."""
    return len(scrapes) == 1 or scrapes[-1].age < scrapes[-2].age
