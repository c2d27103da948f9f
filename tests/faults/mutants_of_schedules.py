"""Mutations of schedules: when they fire, and that each firing is made once."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_MODEL = "mtask/model/schedules.py"

_UNIT_TESTS = "tests/unit/test_schedules.py"

SCHEDULE_MUTATIONS = (
    Mutation(
        "key-by-the-wall-clock",
        "Of the hour that comes twice the second firing is taken for the first.",
        (
            Edit(_MODEL, "moment = firing.astimezone(UTC).replace(tzinfo=None)",
                 'zone = triggers._zone(getattr(self.trigger, "timezone", "UTC"))\n'
                 "        moment = firing.astimezone(zone).replace(tzinfo=None)"),
        ),
        (f"{_UNIT_TESTS}::test_both_firings_of_a_time_that_comes_twice_have_their_own_keys",),
    ),
    Mutation(
        "last-makes-more-than-the-last",
        'catch_up "last" makes what was missed, and what is due besides.',
        (Edit(_MODEL, "        made = made[-1:]\n", "        made = [*missed[-1:], *recent]\n"),),
        (f"{_UNIT_TESTS}::test_down_for_an_hour_and_back_on_time",),
    ),
    Mutation(
        "left-out-hour-fires",
        "A time that the clocks leave out fires all the same, an hour later by the wall.",
        (Edit("mtask/model/triggers.py",
              "if firing.astimezone(found.tzinfo).replace(tzinfo=None) == found.replace(tzinfo=None):", "if True:"),),
        ("tests/unit/test_triggers.py::test_daylight_saving_both_ways",),
    ),
)  # fmt: skip
