"""Mutations of typed calls: the names of their arguments, and what their handles ask and return."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_CALL = "mtask/features/calls/call.py"
_PUBLISH = "mtask/arguments/publish.py"
_HANDLER = "mtask/kernel/document/handlers.py"
_HANDLES = "mtask/client/handles_sync.py"
_FLOWS = "mtask/client/flow_handles_sync.py"
_UNIT = "tests/unit/features/calls/test_calls.py"
_CLIENT = "tests/integration/client/test_handles.py"

CALL_MUTATIONS = (
    Mutation(
        "call-drops-arguments-by-position",
        "Arguments that come by position are lost.",
        (Edit(_CALL, "Caller.__call__", "if args:", "if not args:"),),
        (f"{_UNIT}::test_arguments_are_stored_by_name",),
    ),
    Mutation(
        "keyword-only-arguments-come-by-position",
        "A call gives more arguments by position than its handler takes so.",
        (Edit(_HANDLER, "make_handler", "if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:", "if True:"),),
        (f"{_UNIT}::test_arguments_without_a_name_or_with_two_values_are_refused_at_the_call",),
    ),
    Mutation(
        "argument-by-position-and-by-name",
        "Of two values of an argument, one is dropped without a word.",
        (Edit(_CALL, "_by_position", "if twice:", "if False:"),),
        (f"{_UNIT}::test_arguments_without_a_name_or_with_two_values_are_refused_at_the_call",),
    ),
    Mutation(
        "params-beside-a-call",
        "Params beside a call are dropped without a word.",
        (Edit(_CALL, "Call.parts", "if params is not None:", "if False:"),),
        (f"{_UNIT}::test_params_beside_a_call_are_refused_everywhere",),
    ),
    Mutation(
        "collected-call",
        "The list of a collected call is put into one more list.",
        (Edit(_PUBLISH, "TaskSpec.prepare", "if self.call is not None:", "if False:"),),
        (f"{_UNIT}::test_a_call_is_not_collected",),
    ),
    Mutation(
        "result-as-it-is-stored",
        "A handle returns the dict that is stored, and not the model of the type hint.",
        (
            Edit(_HANDLES, "TaskHandle.result",
                 "found if self._call is None else self._call.returned(self.task_id, found)", "found"),
        ),
        (f"{_CLIENT}::test_handle_is_a_published_that_waits_for_its_task",),
    ),
    Mutation(
        "result-of-a-next-task-is-checked",
        "A handler that may go on gets an error for what Next returns.",
        (Edit(_CALL, "Call.returned", "is True", "is None"),),
        (f"{_UNIT}::test_a_result_without_a_type_hint_or_of_a_next_task_stays_as_it_is",),
    ),
    Mutation(
        "handle-with-the-stored-key",
        "The handle of a tenant's client asks for a key with the tenant in it twice.",
        (Edit(_HANDLES, "TaskHandle.key", "self._client.tenant", "None"),),
        (f"{_CLIENT}::test_handle_of_a_tenants_client_has_the_key_that_the_tenant_gave",),
    ),
    Mutation(
        "step-of-another-flow",
        "A flow gives its own step for that of another flow.",
        (Edit(_FLOWS, "FlowHandle.step",
              "or (isinstance(step, Step) and step.flow_key != self._flow_key)", ""),),
        (f"{_CLIENT}::test_flow_handle_knows_only_steps_that_it_has_published",),
    ),
    Mutation(
        "copied-handle-has-its-client",
        "A copy of a handle is a handle, so that it copies the connection, too, or has none.",
        (Edit(_HANDLES, "TaskHandle.__reduce__", "Published,", "type(self),"),),
        (f"{_CLIENT}::test_copies_of_a_handle_are_plain",),
    ),
)  # fmt: skip
