"""Mutations of the web server: each lets one caller, or somebody without a token, cut off all others."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_BODIES = "mtask/web/bodies.py"
_CONNECTIONS = "mtask/web/gate.py"
_EVENTS = "mtask/features/events/rest.py"
_GATE = "mtask/web/gate.py"
_PAGE = "mtask/web/page/page.py"
_SEATS = "mtask/features/callbacks/sending.py"
_SHARES = "mtask/web/rooms.py"

_LARGE = "tests/integration/web/test_large_bodies.py"
_CONNECTION_TESTS = "tests/integration/web/test_connections.py"
_RATES = "tests/integration/web/test_jobs_metrics_rates.py"

WEB_MUTATIONS = (
    Mutation(
        "values-of-a-body-are-not-bounded",
        "Megabytes of nested lists become a gigabyte.",
        (Edit(_BODIES, "Route.get_route_handler.handle", "check_values, text, largest.values", "len, text"),),
        (f"{_LARGE}::test_a_body_of_too_many_values_is_refused_before_it_is_parsed",),
    ),
    Mutation(
        "shares-are-not-shared",
        "One token takes all streams.",
        (Edit(_SHARES, "Shares.admits", "own + of_tenant", "0"),),
        (
            "tests/unit/web/test_shares.py::test_each_caller_may_have_what_is_left_for_the_others",
            "tests/integration/web/test_tasks.py::test_the_waits_of_one_token_leave_some_for_another",
        ),
    ),
    Mutation(
        "stream-keeps-its-place-after-it-has-caught-up",
        "Eight streams that once resumed leave no place to others for as long as they stay.",
        (Edit(_EVENTS, "events.written", "await reading.aclose()", "pass"),),
        ("tests/integration/web/test_events.py::test_a_stream_that_has_caught_up_leaves_its_place_to_another",),
    ),
    Mutation(
        "idle-connections-stay",
        "Connections that send nothing live for ever.",
        (Edit(_CONNECTIONS, "Connection.look", "now - self._waits_since > _HEAD", "False"),),
        (f"{_CONNECTION_TESTS}::test_a_connection_that_sends_no_whole_request_is_closed",),
    ),
    Mutation(
        "waiting-callers-give-way",
        "Strangers push a caller off that waits for its answer.",
        (Edit(_CONNECTIONS, "Connection.may_give_way", "self.is_known", "False"),),
        (f"{_CONNECTION_TESTS}::test_connections_that_nobody_needs_give_way_to_new_ones",),
    ),
    Mutation(
        "strangers-share-one-measure",
        "One address without a token takes the measure of all.",
        (Edit(_GATE, "Gate._slow_down", "address, now", '"", now'),),
        (f"{_RATES}::test_strangers_are_measured_by_address_and_visitors_by_token",),
    ),
    Mutation(
        "link-signs-in-by-itself",
        "A link of another site signs a visitor in under the token of that site's owner.",
        (Edit(_PAGE, "WebPage._login", "not is_sent", "False"),),
        ("tests/integration/web/page/test_sessions.py::test_a_link_with_a_token_signs_nobody_in_by_itself",),
    ),
    Mutation(
        "receiver-takes-all-seats",
        "A receiver that does not answer delays the callbacks of all.",
        (Edit(_SEATS, "Seats.taken", "all(self._of[owner] < self._left for owner in owners)", "self._left > 0"),),
        ("tests/integration/features/callbacks/test_seats.py::"
         "test_a_tenant_has_its_share_of_the_seats_whatever_its_receivers",),
    ),
)  # fmt: skip
