"""Mutations of encryption: each stores something readable, or believes a value that does not belong where it lies."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_KEYS = "mtask/features/encryption/worker.py"
_RUNNER = "mtask/kernel/worker/running/runner.py"
_BULK = "mtask/features/bulk/client.py"
_READABLE = "mtask/features/encryption/readable.py"
_IDENTITY = "mtask/kernel/document/identity.py"
_CIPHER = "mtask/features/encryption/cipher.py"
_CODEC = "mtask/features/encryption/codec.py"
_VAULT = "mtask/features/encryption/vault.py"

_STORE = "tests/integration/features/encryption/test_encryption.py"
_WORKER = "tests/integration/features/encryption/test_encrypted_runs.py"
_ENDED = f"{_WORKER}::test_worker_ends_a_task_into_which_somebody_put_a_readable_or_copied_value"
_REFUSED = f"{_STORE}::test_value_that_does_not_belong_to_the_task_is_refused"

ENCRYPTION_MUTATIONS = (
    Mutation(
        "value-of-another-task-believed",
        "A reader does not look to which task an encrypted value belongs.",
        (Edit(_CIPHER, "Cipher._decrypted", "not _owns(owner, found) or", ""),),
        (_REFUSED,),
    ),
    Mutation(
        "value-of-another-field-believed",
        "A reader does not look to which field an encrypted value belongs.",
        (Edit(_CIPHER, "Cipher._decrypted", 'or field != found.get("field")', ""),),
        (_REFUSED,),
    ),
    Mutation(
        "readable-value-in-an-encrypted-task-believed",
        "A reader takes a readable value in a task that says that it is encrypted.",
        (Edit(_READABLE, "must_be_sealed", "sealed is not None", "False"),),
        (_REFUSED,),
    ),
    Mutation(
        "readable-task-believed-where-encryption-is-prescribed",
        "A worker runs a readable task although its configuration says that such tasks must be encrypted.",
        (Edit(_READABLE, "must_be_sealed", "(prescribes is not None and prescribes(queue, key))", "False"),),
        (_ENDED,),
    ),
    Mutation(
        "copied-lookup-believed",
        "A reader does not compare the lookups of a task with what its params say of them.",
        (Edit(_CODEC, "_check_lookups", "not entries or not told or None in told", "True"),),
        (_ENDED,),
    ),
    Mutation(
        "params-of-a-schedule-believed-in-any-task",
        "The params of a schedule pass in each task whose key begins like those of the schedule.",
        (Edit(_IDENTITY, "is_firing_of", "and _FIRING.fullmatch(key, len(schedule_key) + 1) is not None", ""),),
        (_ENDED,),
    ),
    Mutation(
        "params-of-a-bulk-change-stored-readable",
        "The params by which a bulk change finds its tasks lie readable in the database for a week.",
        (Edit(_BULK, "plan.operation", "yield from codec.stored_criteria(bulk_id, wanted)", "wanted"),),
        (f"{_STORE}::test_params_of_a_bulk_change_are_encrypted_while_they_are_stored",),
    ),
    Mutation(
        "key-of-another-tenant-believed",
        "A reader decrypts with whatever data key a value names.",
        (Edit(_CIPHER, "Cipher._check_key", "name not in key_names(owner.queues, owner.key)", "False"),),
        (_REFUSED,),
    ),
    Mutation(
        "outcome-stored-readable",
        "A worker stores what a run returns as it is.",
        (Edit(_RUNNER, "Runner._live", "if self._codec.is_plain else await self._encoded(run, outcome)", ""),),
        (f"{_WORKER}::test_nothing_of_a_task_is_readable_in_the_database",),
    ),
    Mutation(
        "removed-key-forgotten",
        "A removed data key leaves nothing behind, so later tasks are stored readable.",
        (
            Edit(_VAULT, "Vault.remove", "_MATERIAL: 1", '"keyAltNames": 1, _MATERIAL: 1'),
            Edit(_VAULT, "Vault._without", "key_id is not None", "False"),
            Edit(_VAULT, "Vault._without", "name, key_id", "name, None"),
        ),
        (f"{_WORKER}::test_key_that_is_removed_while_a_run_is_under_way_leaves_nothing_readable",),
    ),
    Mutation(
        "worker-without-keys-claims",
        "A worker without keys claims encrypted tasks.",
        (
            Edit(
                _KEYS,
                "Keys.guard",
                'if self._codec.is_plain:\n    return [{"sealed": None}]',
                "if self._codec.is_plain:\n    return []",
            ),
            Edit(_KEYS, "Keys.skips", "True", "False"),
        ),
        (f"{_WORKER}::test_worker_without_keys_claims_nothing_encrypted",),
    ),
    Mutation(
        "lookup-encrypted-at-random",
        "Equal lookups give different bytes, so that no search finds them.",
        (Edit(_VAULT, "Vault.encrypt", "_DETERMINISTIC if is_lookup else", ""),),
        (f"{_STORE}::test_each_kind_of_client_encrypts_and_decrypts[sync]",),
    ),
)
