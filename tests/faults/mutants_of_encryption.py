"""Mutations of encryption: each stores something readable, or believes a value that does not belong where it lies."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_KEYS = "mtask/worker/admission/keys.py"
_RUNNER = "mtask/worker/running/runner.py"
_SEALER = "mtask/store/encryption/sealer.py"
_VAULT = "mtask/store/encryption/vault.py"

_STORE = "tests/integration/store/test_encryption.py"
_WORKER = "tests/integration/worker/test_encryption.py"
_REFUSED = f"{_STORE}::test_value_that_does_not_belong_to_the_task_is_refused"

ENCRYPTION_MUTATIONS = (
    Mutation(
        "value-of-another-task-believed",
        "A reader does not look to which task an encrypted value belongs.",
        (Edit(_SEALER, 'if not is_here or owner.name != found.get("name") or field', "if field"),),
        (_REFUSED,),
    ),
    Mutation(
        "value-of-another-field-believed",
        "A reader does not look to which field an encrypted value belongs.",
        (Edit(_SEALER, ' or field != found.get("field"):', ":"),),
        (_REFUSED,),
    ),
    Mutation(
        "key-of-another-tenant-believed",
        "A reader decrypts with whatever data key a value names.",
        (Edit(_SEALER, "        if name not in owner.names():\n", "        if False:\n"),),
        (_REFUSED,),
    ),
    Mutation(
        "outcome-stored-readable",
        "A worker stores what a run returns as it is.",
        (
            Edit(
                _RUNNER,
                "stored = outcome if self._scope.store.sealer is None else await self._encrypted(run, outcome)",
                "stored = outcome",
            ),
        ),
        (f"{_WORKER}::test_nothing_of_a_task_is_readable_in_the_database",),
    ),
    Mutation(
        "removed-key-forgotten",
        "A removed data key leaves nothing behind, so later tasks are stored readable.",
        (
            Edit(_VAULT, 'erased = {"$unset": {_MATERIAL: 1,', 'erased = {"$unset": {"keyAltNames": 1, _MATERIAL: 1,'),
            Edit(_VAULT, "is_removed=key_id is not None))", "is_removed=False))"),
            Edit(
                _VAULT, "return _Key(name, key_id, now + LASTS_WITHOUT", "return _Key(name, None, now + LASTS_WITHOUT"
            ),
        ),
        (f"{_WORKER}::test_key_that_is_removed_while_a_run_is_under_way_leaves_nothing_readable",),
    ),
    Mutation(
        "worker-without-keys-claims",
        "A worker without keys claims encrypted tasks.",
        (
            Edit(
                _KEYS,
                '            return [{"sealed": None}]\n        if not self._left',
                "            return []\n        if not self._left",
            ),
            Edit(_KEYS, "            return True\n", "            return False\n"),
        ),
        (f"{_WORKER}::test_worker_without_keys_claims_nothing_encrypted",),
    ),
    Mutation(
        "lookup-encrypted-at-random",
        "Equal lookups give different bytes, so that no search finds them.",
        (Edit(_VAULT, "_DETERMINISTIC if is_lookup else _RANDOM", "_RANDOM"),),
        (f"{_STORE}::test_each_kind_of_client_encrypts_and_decrypts[sync]",),
    ),
)
