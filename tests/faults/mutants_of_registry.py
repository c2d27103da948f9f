"""Mutations of the registry of handlers: which version is current, and what a publish by name takes from it."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_RULES = "mtask/features/registry/rules.py"
_STATEMENTS = "mtask/features/registry/statements.py"
_OPERATIONS = "mtask/features/registry/operations.py"
_CLIENT = "mtask/features/registry/client.py"
_PUBLISH = "mtask/arguments/publish.py"
_STORES = "mtask/kernel/driver/stores.py"

_UNIT = "tests/unit/features/registry/test_rules.py"
_BY_NAME = "tests/integration/features/registry/test_by_name.py"
_VERSIONS = "tests/integration/features/registry/test_versions.py"
_PAGES = "tests/integration/features/registry/test_pages.py"

REGISTRY_MUTATIONS = (
    Mutation(
        "handler-restart-deploys",
        "An old worker that restarts beside others of its version makes it current again.",
        (Edit(_STATEMENTS, "start", "if not is_served:", "if True:"),),
        (f"{_VERSIONS}::test_a_version_that_live_workers_have_is_neither_moved_nor_made_current_again",
         f"{_VERSIONS}::test_rolling_deploy_and_rollback_end_at_the_version_that_is_live"),
    ),
    Mutation(
        "handler-deploy-at-once",
        "A new version that several workers start at once does not become current, as each finds the others.",
        (Edit(_STATEMENTS, "start", '{"$cond": [is_known, stays[name], value]}', "stays[name]"),
         Edit(_OPERATIONS, "store", "is_served=labels[name] in served", "is_served=True"),),
        (f"{_VERSIONS}::test_workers_of_a_new_version_that_start_at_once_make_it_current",),
    ),
    Mutation(
        "handler-never-succeeded",
        "After a rollback, the version that no worker has stays current.",
        (Edit(_RULES, "successor", "if current in live:", "if True:"),),
        (f"{_UNIT}::test_a_version_without_live_workers_is_followed_by_the_last_started_live_one",
         f"{_VERSIONS}::test_rolling_deploy_and_rollback_end_at_the_version_that_is_live"),
    ),
    Mutation(
        "handler-oldest-succeeds",
        "After a rollback, the oldest live version becomes current.",
        (Edit(_RULES, "successor", "reversed(versions)", "versions"),),
        (f"{_UNIT}::test_a_version_without_live_workers_is_followed_by_the_last_started_live_one",),
    ),
    Mutation(
        "handler-deploy-overtaken",
        "A version that is deployed while another worker lets a live one follow is not current.",
        (Edit(_STATEMENTS, "succeed", '"versions": as_read,', ""),),
        (f"{_VERSIONS}::test_a_version_that_is_started_anew_meanwhile_is_not_followed",),
    ),
    Mutation(
        "handler-versions-unbounded",
        "A document of the registry grows with each deploy.",
        (Edit(_STATEMENTS, "start", "-MAX_VERSIONS", "-1000"),),
        (f"{_VERSIONS}::test_a_document_keeps_the_last_versions_only",),
    ),
    Mutation(
        "handler-defaults-stored",
        "Default values of parameters, which may be secrets, are stored in the registry.",
        (Edit(_RULES, "_LEFT_OUT", '"default", ', ""),),
        (f"{_VERSIONS}::test_default_values_are_not_stored",
         f"{_UNIT}::test_schema_holds_no_defaults_titles_or_examples_and_keeps_fields_with_such_names"),
    ),
    Mutation(
        "by-name-declared-goes-first",
        "What a handler declares goes before what the publisher gives.",
        (Edit(_PUBLISH, "TaskSpec.prepare", "option_of(declared.options if declared else {}, self.options)",
              "option_of(declared.options, {}) if declared and declared.options else option_of({}, self.options)"),),
        (f"{_BY_NAME}::test_explicit_arguments_go_before_declared_ones",),
    ),
    Mutation(
        "by-name-believed-for-ever",
        "A client never asks again what a handler declares.",
        (Edit(_PUBLISH, "Declarations.lacking", "or entry.until < now", ""),),
        (f"{_BY_NAME}::test_a_name_is_looked_up_once_and_again_when_its_time_is_over",),
    ),
    Mutation(
        "by-name-asked-each-time",
        "A client asks for each publish what the handler declares.",
        (Edit(_PUBLISH, "Declarations.lacking", "or entry.until < now", "or True"),),
        (f"{_BY_NAME}::test_a_name_is_looked_up_once_and_again_when_its_time_is_over",),
    ),
    Mutation(
        "by-name-misfit-believed",
        "Params of a newer version are refused by what a client remembers of the older one.",
        (Edit(_PUBLISH, "Preparation.__init__",
              "except InvalidParams as error:", "except ZeroDivisionError as error:"),),
        (f"{_BY_NAME}::test_params_that_do_not_fit_what_is_remembered_are_looked_up_anew",),
    ),
    Mutation(
        "by-name-inside-the-transaction",
        "A publish in a transaction reads the registry in it.",
        (Edit(_STORES, "SyncStore.run", "None if call.is_apart else session", "session"),),
        (f"{_BY_NAME}::test_a_publish_in_a_transaction_reads_the_registry_outside_of_it",),
    ),
    Mutation(
        "by-name-unknown-published",
        "A client that rejects unknown names publishes a task of one that it has met before.",
        (Edit(_PUBLISH, "Declarations.declaration", "entry.unknown is not None and self.rejects", "False"),),
        (f"{_BY_NAME}::test_a_client_that_rejects_unknown_names_publishes_nothing",),
    ),
    Mutation(
        "by-name-warns-each-time",
        "Each publish under an unknown name warns once more.",
        (Edit(_CLIENT, "Registry._tell", "name not in self._told and", ""),),
        (f"{_BY_NAME}::test_an_unknown_name_is_believed_for_a_shorter_time",),
    ),
    Mutation(
        "by-name-older-worker-unknown",
        "A name that only a worker of an older mtask serves is told to be unknown.",
        (Edit(_CLIENT, "Registry._unknown", "None if name in served else", ""),),
        (f"{_BY_NAME}::test_a_name_that_a_worker_of_an_older_mtask_serves_is_no_unknown_one",),
    ),
    Mutation(
        "by-name-cache-unbounded",
        "A client remembers each name that it was ever given.",
        (Edit(_CLIENT, "Registry._remember", "> MAX_ENTRIES", "> 10**9"),),
        (f"{_BY_NAME}::test_the_cache_is_bounded",),
    ),
    Mutation(
        "form-of-another-version",
        "The form of an older version of a handler is read by the parameters of the newer one.",
        (Edit("mtask/features/registry/page.py", "publish", 'or found.declaration.hash != form.text("hash")', ""),),
        (f"{_PAGES}::test_a_task_is_published_from_the_form_of_its_handler",),
    ),
    Mutation(
        "tenant-told-of-handlers",
        "The warning about an unknown name tells a tenant the names of handlers.",
        (Edit("mtask/web/routes/publishing.py", "_warnings",
              "found if caller.tenant is None else UnknownTaskName(name, None)", "found"),),
        (f"{_BY_NAME}::test_rest_warns_of_an_unknown_name_and_tells_a_tenant_no_names",),
    ),
)  # fmt: skip
