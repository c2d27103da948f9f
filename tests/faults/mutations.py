"""Mutation runs: put wrong lines into a copy of the engine, one mutation at a time, and see that the tests notice.

    python -m tests.faults.mutations [NAME...] [--jobs 1]

Every test that a mutation names must pass on the engine as it is and fail under the mutation. Exits with 1 if a
mutation survives.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from tests.faults.mutant import Mutation
from tests.faults.mutants_of_agenda import AGENDA_MUTATIONS
from tests.faults.mutants_of_callbacks import CALLBACK_MUTATIONS
from tests.faults.mutants_of_calls import CALL_MUTATIONS
from tests.faults.mutants_of_celery import CELERY_MUTATIONS
from tests.faults.mutants_of_children import CHILD_MUTATIONS
from tests.faults.mutants_of_controls import CONTROL_MUTATIONS
from tests.faults.mutants_of_deploying import DEPLOYING_MUTATIONS
from tests.faults.mutants_of_django import DJANGO_MUTATIONS
from tests.faults.mutants_of_encryption import ENCRYPTION_MUTATIONS
from tests.faults.mutants_of_events import EVENT_MUTATIONS
from tests.faults.mutants_of_executors import EXECUTOR_MUTATIONS
from tests.faults.mutants_of_flow_requests import FLOW_REQUEST_MUTATIONS
from tests.faults.mutants_of_flows import FLOW_MUTATIONS
from tests.faults.mutants_of_gathering import GATHERING_MUTATIONS
from tests.faults.mutants_of_holding import HOLDING_MUTATIONS
from tests.faults.mutants_of_lookup import LOOKUP_MUTATIONS
from tests.faults.mutants_of_metrics import METRIC_MUTATIONS
from tests.faults.mutants_of_order import ORDER_MUTATIONS
from tests.faults.mutants_of_processes import PROCESS_MUTATIONS
from tests.faults.mutants_of_registry import REGISTRY_MUTATIONS
from tests.faults.mutants_of_rollout import ROLLOUT_MUTATIONS
from tests.faults.mutants_of_schedules import SCHEDULE_MUTATIONS
from tests.faults.mutants_of_starting import STARTING_MUTATIONS
from tests.faults.mutants_of_store import STORE_MUTATIONS
from tests.faults.mutants_of_tenants import TENANT_MUTATIONS
from tests.faults.mutants_of_tracing import TRACING_MUTATIONS
from tests.faults.mutants_of_web import WEB_MUTATIONS
from tests.faults.mutants_of_worker import WORKER_MUTATIONS
from tests.mongo import eventually
from tests.processes import heed_signals, kill_marked, marked

MUTATIONS: tuple[Mutation, ...] = (
    *STORE_MUTATIONS,
    *LOOKUP_MUTATIONS,
    *FLOW_MUTATIONS,
    *CHILD_MUTATIONS,
    *FLOW_REQUEST_MUTATIONS,
    *GATHERING_MUTATIONS,
    *AGENDA_MUTATIONS,
    *CALLBACK_MUTATIONS,
    *CALL_MUTATIONS,
    *CELERY_MUTATIONS,
    *REGISTRY_MUTATIONS,
    *ROLLOUT_MUTATIONS,
    *DJANGO_MUTATIONS,
    *METRIC_MUTATIONS,
    *ENCRYPTION_MUTATIONS,
    *WORKER_MUTATIONS,
    *CONTROL_MUTATIONS,
    *HOLDING_MUTATIONS,
    *ORDER_MUTATIONS,
    *SCHEDULE_MUTATIONS,
    *EVENT_MUTATIONS,
    *DEPLOYING_MUTATIONS,
    *STARTING_MUTATIONS,
    *TRACING_MUTATIONS,
    *TENANT_MUTATIONS,
    *EXECUTOR_MUTATIONS,
    *PROCESS_MUTATIONS,
    *WEB_MUTATIONS,
)
ROOT = Path(__file__).parents[2]
_COPIED = ("mtask", "tests", "examples", "docs", "tools", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE")
#: In the environment of all that a copy's tests start, so that its end can tell what is left.
_MARK = "MTASK_MUTATION_COPY"
#: How long one test, with all its parameters, may take, in seconds; a test that hangs tells nothing.
_LIMIT = 300.0
_TESTS_FAILED = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one mutation."""

    mutation: Mutation
    caught: tuple[str, ...]  #: what pytest says of the tests that failed under it: their names, and why
    missed: tuple[str, ...]  #: the tests that did not fail
    seconds: float


class Copy:
    """A copy of the project in a folder of its own, whose tests run on its own sources."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._time = int(time.time())
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                # With what is compiled: it is told by the time and size of its source. Not what is being written.
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
            elif source.exists():
                shutil.copy2(source, folder / name)

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """Mutate the copy's sources meanwhile."""
        before = {path: path.read_text() for path in (self.folder / edit.path for edit in mutation.edits)}
        try:
            mutation.apply(self.folder)
            self._age(before)
            yield
        finally:
            for path, text in before.items():
                path.write_text(text)
            self._age(before)

    def _age(self, paths: Iterable[Path]) -> None:
        """Give files a time that they never had: compiled ones are told by it, in seconds, and must not be taken."""
        self._time += 1
        for path in paths:
            os.utime(path, (self._time, self._time))

    def pytest(self, *arguments: str, limit: float = _LIMIT) -> tuple[int, str]:
        """Run tests; return pytest's exit code and what it printed; raise RuntimeError where they hung."""
        environment = {
            **os.environ,
            _MARK: self._mark,
            "COLUMNS": "250",
            "PYTHONPATH": str(self.folder),
            # Most mutants are caught by something that does not come.
            "MTASK_TEST_PATIENCE": "40",
            # CI tries few examples of each property. A mutant must not survive by luck.
            "MTASK_TEST_FUZZ": os.environ.get("MTASK_TEST_FUZZ", "3"),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=line", "-p", "no:cacheprovider", *arguments]
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                printed, _ = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"not within {limit:g} s: {' '.join(arguments)}") from None
            finally:
                self.reap()
        return process.returncode, printed

    def reap(self) -> None:
        """End what the tests have left; a mongod whose test is gone ends by itself."""
        kill_marked(_MARK, self._mark)
        eventually(lambda: not marked(_MARK, self._mark), 30, "no process left of a mutation's tests")


@contextmanager
def copied() -> Iterator[Copy]:
    """Copy the project into a temporary folder, and remove it in the end."""
    with tempfile.TemporaryDirectory(prefix="mtask-mutation-") as folder:
        yield Copy(Path(folder))


def check_unmutated(copy: Copy, mutations: Sequence[Mutation]) -> None:
    """See that the copy's tests run on the copy, and that all named tests pass there; raise RuntimeError."""
    script = "import mtask; print(mtask.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(copy.folder)}
    shown = subprocess.run(
        [sys.executable, "-c", script], cwd=copy.folder, env=environment, capture_output=True, text=True, check=True
    )
    if not Path(shown.stdout.strip()).is_relative_to(copy.folder.resolve()):
        raise RuntimeError(f"the copy's tests would run on {shown.stdout.strip()}, and not on the copy")
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    code, printed = copy.pytest(*tests, limit=_LIMIT * len(tests))
    if code != 0:
        raise RuntimeError(f"the tests do not pass on the engine as it is (pytest ended with {code}):\n{printed}")


def try_mutation(copy: Copy, mutation: Mutation) -> Finding:
    """Run a mutation's tests under it; raise RuntimeError where they could not run."""
    begun = monotonic()
    caught: list[str] = []
    missed: list[str] = []
    with copy.mutated(mutation):
        for test in mutation.tests:
            code, printed = copy.pytest("-x", test)
            failed = re.search(r"^FAILED (.+)", printed, re.MULTILINE)
            if code == _TESTS_FAILED and failed:
                caught.append(failed[1])
            elif code == 0:
                missed.append(test)
            else:
                raise RuntimeError(f"{mutation.name}: pytest ended with {code}, which tells nothing:\n{printed}")
    return Finding(mutation, tuple(caught), tuple(missed), monotonic() - begun)


def show(finding: Finding) -> None:
    """Print what became of a mutation."""
    word = "SURVIVED" if finding.missed else "caught"
    print(f"{word:8} {finding.mutation.name:32} {finding.seconds:6.1f} s  {finding.mutation.breaks}")
    for test in finding.caught:
        print(f"{'':9}by {test}")
    for test in finding.missed:
        print(f"{'':9}NOT by {test}")
    sys.stdout.flush()


def try_all(mutations: Sequence[Mutation], jobs: int) -> list[Finding]:
    """Try these mutations, so many at once, each on a copy that no other uses meanwhile."""
    copies: list[Copy] = []
    is_interrupted = threading.Event()

    def try_part(part: Sequence[Mutation]) -> list[Finding]:
        findings = []
        with copied() as copy:
            copies.append(copy)
            for mutation in part:
                if is_interrupted.is_set():
                    break
                findings.append(try_mutation(copy, mutation))
                show(findings[-1])
        return findings

    with ThreadPoolExecutor(jobs) as pool:
        try:
            parts = list(pool.map(try_part, [mutations[start::jobs] for start in range(jobs)]))
        except BaseException:
            is_interrupted.set()
            for copy in copies:
                copy.reap()
            raise
    return [finding for part in parts for finding in part]


def main(arguments: Sequence[str] | None = None, known: Sequence[Mutation] = MUTATIONS) -> int:
    """Try the mutations named, or all; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations to try; all, if none is named")
    parser.add_argument("--jobs", type=int, default=1, help="how many to try at once (default: 1)")
    parser.add_argument("--list", action="store_true", help="show the mutations and try none")
    given = parser.parse_args(arguments)
    by_name = {mutation.name: mutation for mutation in known}
    unknown = [name for name in given.names if name not in by_name]
    if unknown or given.jobs < 1:
        parser.error(f"no such mutation: {', '.join(unknown)}" if unknown else "--jobs: use 1 or more")
    chosen = [by_name[name] for name in dict.fromkeys(given.names)] or list(known)
    if given.list:
        for mutation in chosen:
            print(f"{mutation.name:32} {mutation.breaks}")
        return 0
    with copied() as copy:
        check_unmutated(copy, chosen)
    print(f"{len(chosen)} mutations; their tests pass on the engine as it is", flush=True)
    findings = try_all(chosen, given.jobs)
    survivors = [finding.mutation.name for finding in findings if finding.missed]
    print(f"{len(findings) - len(survivors)} of {len(findings)} caught", flush=True)
    if survivors:
        print(f"survived: {', '.join(survivors)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    heed_signals()
    sys.exit(main())
