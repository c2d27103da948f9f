"""Whether a process on record is known to be dead, also where /proc hides the processes of other users."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mtask.kernel.worker.process import registration
from tests.mongo import eventually

_SLEEP = [sys.executable, "-c", "import sys; sys.stdin.read()"]
_ASK = """
import json, os, subprocess, sys
subprocess.run(["mount", "-t", "proc", "-o", "hidepid=2", "proc", "/proc"], check=True)
documents = json.loads(sys.argv[1])
from mtask.kernel.worker.process import registration as host
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
seen = os.path.exists(f"/proc/{documents[0]['pid']}")
print(json.dumps([seen, host.pid_scope() is not None, *(host.is_known_dead(found) for found in documents)]))
"""


def document(pid: int, scope: str | None = None) -> dict[str, object]:
    return {"host": registration.host_name(), "pid": pid, "pid_scope": scope or registration.pid_scope(pid)}


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours, under way."""
    process = subprocess.Popen(_SLEEP, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_live_process_is_not_known_dead(child: subprocess.Popen[bytes]) -> None:
    assert not registration.is_known_dead(document(child.pid))


def test_ended_process_is_known_dead_before_and_after_it_is_reaped(child: subprocess.Popen[bytes]) -> None:
    told = document(child.pid)
    child.kill()
    eventually(lambda: registration.is_known_dead(told), message="a zombie is dead")
    child.wait()
    assert registration.is_known_dead(told)


def test_another_process_with_the_same_id_means_that_the_former_is_dead(child: subprocess.Popen[bytes]) -> None:
    scope = registration.pid_scope(child.pid)
    assert scope is not None
    assert registration.is_known_dead(document(child.pid, scope.rpartition("/")[0] + "/1"))


@pytest.mark.parametrize("pid", [0, -1, 2**40, 2**70])
def test_number_that_no_process_can_have_is_not_taken_for_a_dead_one(pid: int) -> None:
    assert not registration.is_known_dead(document(pid, registration.pid_scope()))


def test_process_of_another_user_that_proc_hides_is_not_known_dead() -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a /proc that hides processes needs root")
    live = subprocess.Popen(_SLEEP, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        told = [document(live.pid), document(ended.pid, registration.pid_scope())]
        ended.wait()
        asked = subprocess.run(
            ["unshare", "--mount", sys.executable, "-c", _ASK, host_documents(told)], capture_output=True, text=True
        )
        if asked.returncode != 0:
            pytest.skip(f"this system does not allow it: {asked.stderr.strip()[-200:]}")
        assert asked.stdout.split() == ["[false,", "true,", "false,", "true]"]
    finally:
        live.kill()
        live.communicate()


def host_documents(told: list[dict[str, object]]) -> str:
    return json.dumps(told)
