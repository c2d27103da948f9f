"""Mutations of schedules: when they fire, and that each firing is made once."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutation

_CLIENT = "mtask/features/schedules/client.py"
_MODEL = "mtask/features/schedules/rules.py"
_SCHEDULER = "mtask/features/schedules/worker.py"
_STORE = "mtask/features/schedules/operations.py"
_TRIGGERS = "mtask/features/schedules/triggers.py"

_SCHEDULES_TESTS = "tests/integration/features/schedules/test_schedules.py"
_MANY_TESTS = "tests/integration/features/schedules/test_schedules_many.py"
_TRIGGER_TESTS = "tests/unit/features/schedules/test_triggers.py"
_UNIT_TESTS = "tests/unit/features/schedules/test_schedules.py"

SCHEDULE_MUTATIONS = (
    Mutation(
        "moved-on-whatever-the-revision",
        "Each of many processes makes the same firing.",
        (Edit(_STORE, "advance", '"revision": schedule.revision,', ""),),
        (f"{_SCHEDULES_TESTS}::test_each_firing_exists_once_however_many_schedulers_run",),
    ),
    Mutation(
        "changed-whatever-the-revision",
        "Who changes a schedule while it fires takes the firing back.",
        (Edit(_STORE, "_replace", '"revision": revision,', ""),),
        (f"{_SCHEDULES_TESTS}::test_a_change_beside_a_firing_does_not_take_it_back",),
    ),
    Mutation(
        "key-from-the-start",
        "Two processes make two tasks of one firing, as its jitter is random.",
        (Edit(_CLIENT, "new_task", "(firing)", "(start)"),),
        (f"{_SCHEDULES_TESTS}::test_jitter_delays_the_task_and_not_its_key",),
    ),
    Mutation(
        "key-by-the-wall-clock",
        "Of the hour that comes twice the second firing is taken for the first.",
        (
            Edit(_MODEL, "Schedule.key_of",
                 "moment = firing.astimezone(UTC).replace(tzinfo=None)",
                 'zone = triggers.clocks.zone(getattr(self.trigger, "timezone", "UTC"))\n'
                 "moment = firing.astimezone(zone).replace(tzinfo=None)"),
        ),
        (f"{_UNIT_TESTS}::test_both_firings_of_a_time_that_comes_twice_have_their_own_keys",),
    ),
    Mutation(
        "begun-firing-left",
        "What a process wrote down and did not publish before it died is published by nobody.",
        (
            Edit(_SCHEDULER, "Scheduler._planned",
                 "left = [self._firing(schedule, pending) for pending in schedule.schedule_state.pending]",
                 "left: list[Firing] = []"),
        ),
        (f"{_SCHEDULES_TESTS}::test_schedulers_go_on_where_one_dies_in_mid_firing",),
    ),
    Mutation(
        "fires-by-the-local-clock",
        "What is due is read from the wall clock of the worker's machine.",
        (
            Edit(_SCHEDULER, "Scheduler._fire_due",
                 "coming.server_time", 'coming.server_time and datetime.now(__import__("datetime").UTC)'),
        ),
        ("tests/acceptance/test_each_firing_happens_once.py"
         "::test_every_second_by_five_processes_with_wrong_clocks_of_which_one_after_another_is_killed",),
    ),
    Mutation(
        "last-makes-more-than-the-last",
        'catch_up "last" makes what was missed, and what is due besides.',
        (Edit(_MODEL, "plan", "made[-1:]", "[*missed[-1:], *recent]"),),
        (f"{_UNIT_TESTS}::test_down_for_an_hour_and_back_on_time",),
    ),
    Mutation(
        "left-out-hour-fires",
        "A time that the clocks leave out fires all the same, an hour later by the wall.",
        (Edit(_TRIGGERS, "_next_of_cron", "first_shift(where, begin, end)", "None"),),
        (f"{_TRIGGER_TESTS}::test_daylight_saving_both_ways",),
    ),
    Mutation(
        "second-pass-forgotten",
        "A time that comes twice fires once.",
        (Edit(_TRIGGERS, "_next_of_cron", "or local < searched", ""),),
        (f"{_TRIGGER_TESTS}::test_daylight_saving_both_ways",
         f"{_TRIGGER_TESTS}::test_last_firing_of_all_is_in_the_second_pass_of_an_hour_that_comes_twice"),
    ),
    Mutation(
        "text-behind-a-name-ignored",
        'A crontab with "mon#2" fires each Monday.',
        (Edit("mtask/features/schedules/triggers.py", "_parts",
              "rest := part[found.end() :]", '(rest := part[found.end() :]) == "nothing"'),),
        (f"{_TRIGGER_TESTS}::test_text_without_a_meaning_is_refused_and_its_place_is_named",),
    ),
    Mutation(
        "resumed-makes-up-for-its-pause",
        "A schedule that is resumed fires for the time in which it was paused.",
        (
            Edit(_CLIENT, "set_paused.changed",
                 '{**former["schedule_state"], "next_fire_time": schedule.next_firing(now)}',
                 'former["schedule_state"]'),
        ),
        (f"{_SCHEDULES_TESTS}::test_paused_resumed_removed",),
    ),
    Mutation(
        "published-whatever-is-pending",
        "A process that was frozen publishes a firing's task anew that was done and removed meanwhile.",
        (
            Edit(_STORE, "_published", ', f"{_PENDING}.fire_time": {"$in": times}', ""),
            Edit(_STORE, "_published", '"cond": is_pending', '"cond": True'),
        ),
        (f"{_MANY_TESTS}::"
         "test_process_frozen_before_it_publishes_does_not_publish_what_was_done_and_removed_meanwhile",),
    ),
    Mutation(
        "schedules-of-others-looked-for",
        "What nobody here declares is read like any other schedule.",
        (Edit(_STORE, "_fires", '"source": {"$in": ["client", None]},', ""),),
        (f"{_MANY_TESTS}::test_look_for_what_comes_examines_hardly_more_than_it_returns",),
    ),
    Mutation(
        "one-page-of-schedules",
        "Schedules that cannot be fired hide those behind them.",
        (Edit(_SCHEDULER, "Scheduler._fire_due", "page is None", "page is None or page is not None"),),
        (f"{_MANY_TESTS}::test_malformed_schedules_starve_no_others",),
    ),
    Mutation(
        "firings-computed-in-the-loop",
        "Nothing else goes on in a worker that catches up.",
        (Edit(_SCHEDULER, "Scheduler._fire_all",
              "await runtime.to_thread(self._planned_all, batch, now)", "self._planned_all(batch, now)"),),
        (f"{_MANY_TESTS}::test_catching_up_does_not_block_the_event_loop",),
    ),
    Mutation(
        "grace-of-many-intervals",
        'catch_up "none" makes the last ten seconds in a burst.',
        (Edit(_MODEL, "plan", '1 if schedule.catch_up == "none" else', ""),),
        (f"{_UNIT_TESTS}::test_grace_of_none_is_one_interval_at_most",),
    ),
)  # fmt: skip
