"""A publisher process: asks for the load's tasks batch by batch, and writes down what it was told.

It may be killed at any instant: started again, it reads its own ledger, asks once more for what it was never told of,
and goes on. So does it after an error, as any service with idempotency keys would.
"""

from __future__ import annotations

import argparse
import math
import signal
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from pymongo.errors import PyMongoError

import mtask
from mtask.errors import MtaskError, TaskError
from tests.chaos.history import Call, History, Ledger
from tests.chaos.load import flows, tasks

#: Between two tries of what the database did not answer, in seconds.
_PAUSE = 0.1
#: The workers keep up with the publisher while half of a batch has begun after this time, in seconds. If they do not,
#: it waits: on a machine that cannot carry the load, every delay would be the machine's.
_BEGUN_WITHIN = 2.0


class Publisher:
    """Publishes until it is told to stop; each step is written down before and after."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._name: str = arguments.name
        self._seed: int = arguments.seed
        self._workers: list[str] = arguments.workers
        self._database: str = arguments.database
        self._pause = tasks.BATCH / arguments.rate
        self._is_stopped = threading.Event()
        history = History(Path(arguments.folder))
        self._batch = next_batch(history.calls_path(self._name))
        self._ledger = Ledger(history.calls_path(self._name))
        self._client = mtask.Client(arguments.uri, database=self._database, server_timeout=timedelta(seconds=3))

    def stop(self, *_: object) -> None:
        """Finish the batch under way, and end."""
        self._is_stopped.set()

    def run(self) -> None:
        """Publish at the rate asked for, or as fast as the workers follow.

        What a break has delayed is caught up with, at most ten times as fast.
        """
        due = time.monotonic()
        while not self._is_stopped.is_set():
            for call in tasks.gather_calls(self._seed, self._name, self._batch):
                self._gather(call)
            self._publish_batch(self._batch)
            self._publish_flow(self._batch)
            for step in flows.deeds(self._seed, self._name, self._batch):
                self._do_to_step(step)
            for deed in tasks.deeds(self._seed, self._name, self._batch):
                self._do(deed)
            self._batch += 1
            due += self._pause
            self._is_stopped.wait(max(self._pause / 10, due - time.monotonic()))
            while not self._is_stopped.is_set() and not self._do_workers_follow():
                due = time.monotonic()  # what the workers could not do is not caught up with
                self._is_stopped.wait(self._pause)
        self._client.close()

    def _do_workers_follow(self) -> bool:
        """Whether half of the tasks have begun that were published before the last `_BEGUN_WITHIN` seconds."""
        earlier = self._batch - 1 - math.ceil(_BEGUN_WITHIN / self._pause)
        if earlier < 0:
            return True
        task_ids = [
            tasks.task_id_of(spec)
            for spec in tasks.specs(self._seed, self._name, earlier, self._workers, self._database)
        ]
        waiting = {"_id": {"$in": task_ids}, "task_state.status": "INIT"}
        try:
            return self._client.tasks.count_documents(waiting) <= tasks.BATCH / 2
        except PyMongoError:
            return True  # the next call waits for the database

    def _publish_batch(self, batch: int) -> None:
        specs = tasks.specs(self._seed, self._name, batch, self._workers, self._database)
        task_ids = [tasks.task_id_of(spec) for spec in specs]
        while True:
            calls = self._send("publish", task_ids)
            try:
                results = self._client.publish_many(specs)
            except MtaskError as error:
                self._told(calls, ["unknown"] * len(calls), str(error))
                time.sleep(_PAUSE)
                continue
            self._told(calls, [_answer(result) for result in results])
            return

    def _gather(self, call: tasks.GatherCall) -> None:
        params = {"call_id": call.call_id, "seconds": call.seconds}
        while True:
            calls = self._send("gather", [f"{call.name}:{call.key}"], call.call_id)
            try:
                published = self._client.publish(
                    call.name, params, key=call.key, queue=tasks.QUEUE, call_id=call.call_id, **call.way, **tasks.URGENT
                )
            except MtaskError as error:
                self._told(calls, ["unknown"], str(error))
                time.sleep(_PAUSE)
                continue
            self._told(calls, [_answer(published)])
            return

    def _publish_flow(self, batch: int) -> None:
        made = flows.flow_of(self._seed, self._name, batch)
        while made is not None:
            flow, task_ids = made
            calls = self._send("publish", task_ids)
            try:
                published = self._client.publish_flow(flow)
            except MtaskError as error:
                self._told(calls, ["unknown"] * len(calls), str(error))
                time.sleep(_PAUSE)
                continue
            self._told(calls, ["created" if published.created else "kept"] * len(calls))
            return

    def _do_to_step(self, step: flows.StepDeed) -> None:
        act = self._client.retry if step.operation == "retry" else self._client.cancel
        self._act(step.operation, f"{step.name}:{step.key}", lambda: act(step.name, step.key))

    def _do(self, deed: tasks.Deed) -> None:
        batch, index = divmod(deed.number, tasks.BATCH)
        spec = tasks.specs(self._seed, self._name, batch, self._workers, self._database)[index]
        name, key = str(spec.task), str(spec.key)
        client = self._client if spec.tenant is None else self._client.for_tenant(spec.tenant)
        act: Callable[[], object] = {
            "publish": lambda: _answer(client.publish(name, spec.params, key=key, queue=spec.queue, **spec.options)),
            "update": lambda: _answer(
                client.publish(name, spec.params, key=key, queue=spec.queue, if_exists="update", **spec.options)
            ),
            "cancel": lambda: client.cancel(name, key),
            "retry": lambda: client.retry(name, key),
            "rerun": lambda: client.rerun(name, key),
        }[deed.operation]
        self._act(deed.operation, tasks.task_id_of(spec), act)

    def _act(self, operation: tasks.Operation, task_id: str, act: Callable[[], object]) -> None:
        calls = self._send(operation, [task_id])
        try:
            done = act()
        except TaskError as error:
            self._told(calls, ["refused"], str(error))
        except MtaskError as error:
            self._told(calls, ["unknown"], str(error))
        else:
            self._told(calls, [done if isinstance(done, str) else "done"])

    def _send(self, operation: tasks.Operation, task_ids: Sequence[str], gather_id: str | None = None) -> list[Call]:
        calls = [
            Call(uuid.uuid4().hex, operation, task_id, self._name, time.monotonic(), gather_id=gather_id)
            for task_id in task_ids
        ]
        self._ledger.write_all(calls)
        return calls

    def _told(self, calls: Sequence[Call], answers: Sequence[str], error: str | None = None) -> None:
        self._ledger.write_all([call.told_now(answer, error) for call, answer in zip(calls, answers, strict=True)])


def _answer(result: object) -> str:
    if isinstance(result, mtask.Published):
        return "created" if result.created else "updated" if result.updated else "kept"
    return "refused"


def next_batch(path: Path) -> int:
    """Return the batch with which a publisher goes on: the first of which it was not told everything."""
    if not path.exists():
        return 0
    told: set[int] = set()
    with path.open("rb") as file:
        for line in file:
            call = Call.parse(line)
            is_step = call.task_id.partition(":")[2].startswith(flows.PREFIX)
            if call.operation == "publish" and call.answer in ("created", "kept") and not is_step:
                told.add(int(call.task_id.rpartition("/")[2]))
    return next(number for number in range(len(told) + 1) if number not in told) // tasks.BATCH


def main(given: Sequence[str] | None = None) -> None:
    """Publish until SIGTERM."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--uri", required=True)
    parser.add_argument("--database", required=True)
    parser.add_argument("--folder", required=True, help="the history's")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True, help="tasks a second")
    parser.add_argument("--workers", nargs="+", required=True, help="worker_ids that tasks may name")
    publisher = Publisher(parser.parse_args(given))
    signal.signal(signal.SIGTERM, publisher.stop)
    publisher.run()


if __name__ == "__main__":
    main()
