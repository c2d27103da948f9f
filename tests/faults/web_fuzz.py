"""Hostile requests to a real `mtask web`: schemathesis on its OpenAPI document, then our own to API and page.

`python -m tests.faults.web_fuzz --minutes 10 --inputs 10000 --seed 1`. Exit code 0: no answer of the 5xx, none that the
document does not tell of, each refusal is clear, each hostile value is escaped, and no secret is in an answer or in the
log; 1: not so. schemathesis is installed into build/venv-schemathesis, unless the environment has it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mtask.local import temporary
from tests.faults.web.hostile import Hostile, Request
from tests.faults.web.judging import Judge, Verdict
from tests.faults.web.sending import Answer, Sender
from tests.faults.web.serving import ROOT, Target, target

#: The version with which the last run was clean. A newer one may check more.
SCHEMATHESIS = "schemathesis==4.32.5"
#: The folder for what a run leaves behind.
BUILD = ROOT / "build"
#: The requests that are on their way at once.
_AT_ONCE = 12
_CONFIG = """
hooks = "tests.faults.web.allowed"
base-url = "{url}"
request-timeout = 40
max-stream-events = 1
continue-on-failure = true
workers = 1

[auth.openapi]
bearer = {{ bearer = "${{MTASK_FUZZ_TOKEN}}" }}

[checks]
max_response_time = 40  # a batch of 1,000 tasks takes long on a busy machine

[output.sanitization]
enabled = true
"""


def main(given: Sequence[str] | None = None) -> int:
    """Run it on a server of its own, and tell the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="time for schemathesis; 0: leave it out [10]")
    parser.add_argument("--inputs", type=int, default=10_000, help="hostile requests of our own [10000]")
    parser.add_argument("--seed", type=int, default=1, help="repeats an earlier run's requests [1]")
    parser.add_argument("--only", help="schemathesis: only the operations whose names match this pattern")
    arguments = parser.parse_args(given)
    faults: list[str] = []
    with temporary() as server, tempfile.TemporaryDirectory() as folder, target(server.uri, Path(folder)) as serving:
        if arguments.minutes:
            faults += schemathesis(serving, arguments.minutes, arguments.seed, arguments.only)
        if arguments.inputs:
            begun = time.monotonic()
            verdict = asyncio.run(hostile(serving, arguments.inputs, arguments.seed))
            print(described(verdict, time.monotonic() - begun))
            faults += verdict.findings
        code = serving.stop()
        faults += [f"the server ended with code {code}"] if code else []
        faults += in_log(serving)
    for fault in faults:
        print(f"FINDING {fault}")
    print("NOT CLEAN" if faults else "CLEAN")
    return 1 if faults else 0


# --- schemathesis -----------------------------------------------------------------------------------------


def schemathesis(serving: Target, minutes: float, seed: int, only: str | None = None) -> list[str]:
    """Run schemathesis with all of its checks on the OpenAPI document; return its failures."""
    config = serving.folder / "schemathesis.toml"
    config.write_text(_CONFIG.format(url=serving.url))
    command = [*_schemathesis(), "--config-file", str(config), "run", f"{serving.url}/v1/openapi.json"]
    command += ["--checks", "all", "--max-time", str(round(minutes * 60)), "--seed", str(seed)]
    command += ["--header", f"Authorization: Bearer {serving.tokens['operate']}"]
    command += ["--include-name-regex", only] if only else []
    BUILD.mkdir(exist_ok=True)
    dropped = BUILD / "schemathesis-dropped.txt"
    dropped.write_text("")
    environment = {**os.environ, "MTASK_FUZZ_TOKEN": serving.tokens["operate"], "PYTHONPATH": str(ROOT)}
    environment |= {"MTASK_FUZZ_DROPPED": str(dropped), "MTASK_FUZZ_SECRETS": ",".join(serving.secrets)}
    ended = subprocess.run(command, cwd=serving.folder, env=environment, capture_output=True, text=True, check=False)
    report = BUILD / "schemathesis.log"
    report.write_text(ended.stdout + ended.stderr)
    print(ended.stdout[ended.stdout.rfind("= SUMMARY =") :] if ended.returncode in (0, 1) else ended.stdout[-3000:])
    print(ended.stderr[-3000:], end="")
    reasons = Counter(line.partition("\t")[0] for line in dropped.read_text().splitlines())
    print("refused as a schema cannot say:", *(f"{count} {reason};" for reason, count in reasons.most_common()))
    return [] if ended.returncode == 0 else [f"schemathesis: exit code {ended.returncode}; see {report}"]


def _schemathesis() -> list[str]:
    """Return the command, installed into an environment of its own if need be: its pins are none of ours."""
    if find_spec("schemathesis") is not None:
        return [sys.executable, "-m", "schemathesis.cli"]
    folder = BUILD / "venv-schemathesis"
    if not (folder / "bin" / "schemathesis").exists():
        venv.create(folder, with_pip=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", SCHEMATHESIS], check=True)
    return [str(folder / "bin" / "schemathesis")]


# --- our own requests -------------------------------------------------------------------------------------


async def hostile(serving: Target, count: int, seed: int) -> Verdict:
    """Send hostile requests, and judge their answers."""
    sender = Sender(serving)
    known = await sender.know()
    judge = Judge(serving.secrets, list(known.csrf.items()))
    requests = Hostile(seed, known, serving.port).requests(count)

    async def go() -> None:
        for request in requests:
            judge.look(request, await _sent(sender, request))

    async with asyncio.TaskGroup() as group:
        for _ in range(_AT_ONCE):
            group.create_task(go())
    return judge.verdict


async def _sent(sender: Sender, request: Request) -> Answer | None:
    try:
        return await sender.send(request)
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{request.shown}: {error}") from error


def described(verdict: Verdict, seconds: float) -> str:
    """Return the figures, one a line."""
    total = verdict.by_label.total()
    lines = [
        f"{total} hostile requests in {seconds:.0f} s: {_counted(verdict.by_label)}",
        f"answers: {_counted(verdict.statuses)}; no HTTP, and no answer: {verdict.unanswered}",
        f"pages that had to say that the database does not answer in time: {verdict.slow}",
        f"pages that showed hostile markup as text: {verdict.pages_with_canary}",
        *(f"{kind}: {count}" for kind, count in verdict.kinds.most_common()),
    ]
    return "\n".join(lines)


def _counted(counter: object) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(dict(counter).items()))  # type: ignore[call-overload]


def in_log(serving: Target) -> list[str]:
    """Return what the server's log holds and should not: secrets, and failures that nobody foresaw."""
    log = serving.log
    if not log:
        return ["the server has printed nothing"]
    (BUILD / "web-fuzz.log").write_text(log)
    faults = [f"a secret in the log: {_line(log, secret)}" for secret in serving.secrets if secret in log]
    faults += [
        f"the log holds {sign!r}: {_line(log, sign)}" for sign in ("Traceback", " a request failed") if sign in log
    ]
    faults += [f"credentials in the log: {found}" for found in re.findall(r"\S*mongodb://[^/\s]*@\S*", log)[:3]]
    return faults


def _line(log: str, sign: str) -> str:
    at = log.index(sign)
    return log[max(0, at - 200) : at + 1500]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server and the worker end, too
    sys.exit(main())
