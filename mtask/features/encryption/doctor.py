"""The doctor's check of data keys: which due tasks nobody can decrypt any more."""

from __future__ import annotations

from mtask.doctor import operations as diagnosis
from mtask.errors import DataKeyNotFound, MtaskError
from mtask.features.encryption.cipher import Cipher
from mtask.kernel.driver.codec import GET_CODEC
from mtask.search.findings import Check, Findings, fail, ok, warn

_CHECK = "data keys"
_MOST = 200


def data_keys() -> Findings:
    """Examine the data keys of the tasks that are due. A database without encrypted tasks gets no finding."""
    found = yield from diagnosis.due_groups(_MOST)
    names = sorted({str(row["_id"]["sealed"]) for row in found if row["_id"].get("sealed") is not None})
    codec = yield GET_CODEC
    if not isinstance(codec, Cipher):
        if not names:
            return []
        message = f"due tasks are encrypted ({', '.join(names[:5])}), and this command has no keys to examine them"
        return [warn(_CHECK, message, "Call again with --encryption-key-file.")]
    yield from codec.load_keys(names)
    bad = [(name, problem) for name in names if (problem := codec.vault.problem_of(name)) is not None]
    if not bad:
        return [ok(_CHECK, f"{len(names)} of due tasks, and all can be used" if names else "none of a due task")]
    return [fail(_CHECK, f"of due tasks: {_what(problem)}", _remedy(name, problem)) for name, problem in bad]


def _what(problem: MtaskError) -> str:
    return problem.what if isinstance(problem, DataKeyNotFound) else str(problem).removesuffix(".")


def _remedy(name: str, problem: MtaskError) -> str:
    if isinstance(problem, DataKeyNotFound):
        return "Restore the key vault from a backup, or cancel these tasks: nobody can decrypt them."
    return f"Call again with the master key with which {name} was made."


CHECKS = [Check(_CHECK, data_keys)]
