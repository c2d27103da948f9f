"""encryption: one worker process drains a backlog of encrypted tasks, against the same tasks, readable."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from benchmarks.measuring.counters import Cost, cpu_parts
from benchmarks.measuring.draining import LABEL, drain_with, insert_backlog
from benchmarks.measuring.server import Scratch, Server
from benchmarks.options import Options
from benchmarks.report.figures import Result, Target, compared, turns
from mtask.features.encryption.cipher import Cipher
from mtask.features.encryption.settings import MASTER_KEY_BYTES, Encryption
from mtask.features.encryption.vault import vault_for
from mtask.kernel.driver.codec import Owner
from mtask.kernel.operations.encode import PARAMS

TASKS = 10_000
SIZE = 200
_NAME, _QUEUE = "echo", "queue:default"
READABLE, ENCRYPTED = "readable", "encrypted"
_RATIO = Target.at_least(0.4)


def measure(server: Server, options: Options) -> Result:
    """Drain the same backlog with and without encryption of params and returns, in turn."""
    count = options.tasks_or(TASKS)
    costs: dict[str, list[Cost]] = {READABLE: [], ENCRYPTED: []}
    for run in range(options.runs):
        for side in turns(list(costs), run):
            server.say(f"encryption: run {run + 1} of {options.runs}, {side}")
            with server.scratch() as scratch:
                costs[side].append(_drained(server, scratch, count, is_encrypted=side == ENCRYPTED))
    rates = {side: [cost.rate for cost in found] for side, found in costs.items()}
    figure = compared(ENCRYPTED, "tasks/s", rates[ENCRYPTED], rates[READABLE], _RATIO, against_name=READABLE)
    return Result(
        "encryption",
        f"one worker process, {count:,} waiting tasks with {SIZE} B of params and returns, both encrypted",
        [figure],
        {"tasks": count, "size_bytes": SIZE, "runs": options.runs},
        cpu={side: cpu_parts(found) for side, found in costs.items()},
        notes=["A local master key. The worker decrypts the params and encrypts the returns of each task."],
    )


def _drained(server: Server, scratch: Scratch, count: int, *, is_encrypted: bool) -> Cost:
    readable = {"text": "x" * SIZE}
    if not is_encrypted:
        return drain_with(server, scratch, insert_backlog(scratch, _NAME, count, params=lambda _: readable)).cost
    key_file = Path(server.folder) / f"{scratch.name}.key"
    key_file.write_bytes(secrets.token_bytes(MASTER_KEY_BYTES))
    key_vault = f"{scratch.name}.vault"
    encryption = Encryption({"local": {"key": key_file.read_bytes()}}, key_vault=key_vault)
    cipher = Cipher(vault_for(encryption, scratch.uri))
    try:
        cipher.vault.create(_QUEUE)
        cipher.vault.load([_QUEUE])

        def params(number: int) -> Any:
            return cipher.encrypt(_QUEUE, Owner(_NAME, f"{LABEL}/{number:07}", ()), PARAMS, readable)

        backlog = insert_backlog(scratch, _NAME, count, params=params)
    finally:
        cipher.vault.close()
    flags = ("--encryption-key-file", str(key_file), "--encryption-key-vault", key_vault)
    return drain_with(server, scratch, backlog, flags=flags).cost
