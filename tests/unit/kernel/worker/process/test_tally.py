"""Counts: buckets, sums, differences, the bound of pairs, and what is read back from a document."""

from __future__ import annotations

import bson
import pytest

from mtask.kernel.worker.process.counts import BOUNDS, MAX_PAIRS, OTHER, Histogram, Pair, Tally, tally_of, total


def tally(**runs: int) -> Tally:
    """Return a tally with so many successes of each name."""
    made = Tally()
    for name, count in runs.items():
        made.of("q", name).runs["SUCCESS"] = count
    return made


def test_a_duration_counts_in_the_bucket_of_the_first_bound_that_is_not_below_it() -> None:
    histogram = Histogram()
    for seconds in (0.0, 0.005, 0.0051, 7200.0, 7200.1, -3.0):
        histogram.observe(seconds)
    assert histogram.counts[0] == 3, "0, the bound itself, and a negative one, which a fast clock makes"
    assert histogram.counts[1] == 1
    assert histogram.counts[-2:] == [1, 1]
    assert histogram.count == 6
    assert histogram.seconds == pytest.approx(14400.1101)


def test_a_quantile_is_the_bound_of_its_bucket() -> None:
    histogram = Histogram()
    assert histogram.quantile(0.5) is None
    for seconds in [0.001] * 95 + [2.0] * 5:
        histogram.observe(seconds)
    assert (histogram.quantile(0.95), histogram.quantile(0.96)) == (0.005, 2.5)
    histogram = Histogram()
    histogram.observe(1e6)
    assert histogram.quantile(0.5) is None, "it lies above all bounds"


def test_sums_and_differences_undo_each_other() -> None:
    first, second = tally(a=3, b=1), tally(b=2, c=5)
    for made, seconds in ((first, 0.2), (second, 40.0)):
        made.of("q", "b").wait.observe(seconds)
        made.leases_lapsed, made.claims_lost = 2, 1
        made.lateness.observe(seconds)
    both = total([first, second])
    assert {pair.name: counts.runs["SUCCESS"] for pair, counts in both.pairs.items()} == {"a": 3, "b": 3, "c": 5}
    assert (both.leases_lapsed, both.claims_lost, both.lateness.count, both.run_cnt) == (4, 2, 2, 11)
    both.add(first, -1)
    assert both.pairs[Pair("q", "b")].runs == second.pairs[Pair("q", "b")].runs
    assert both.pairs[Pair("q", "b")].wait.counts == second.pairs[Pair("q", "b")].wait.counts
    assert (both.pairs[Pair("q", "a")].runs, both.leases_lapsed) == ({"SUCCESS": 0}, 2)


def test_a_document_holds_a_tally_and_strange_documents_count_as_nothing() -> None:
    made = tally(**{"a.b$": 3})
    made.of("q", "a.b$").run.observe(99.0)
    made.lateness.observe(0.1)
    made.leases_lapsed = 7
    document = bson.decode(bson.encode(made.document()))
    assert document["lateness"]["counts"] == [0] * 4 + [1], "empty buckets at the end are not stored"
    assert tally_of(document).document() == made.document()
    strange = {"pairs": [None, 3, {"queue": 1, "runs": [], "wait": {"counts": ["x", None, True, -1, 2.0]}}]}
    read = tally_of({**strange, "leases_lapsed": "many", "lateness": []})
    assert (read.leases_lapsed, read.run_cnt) == (0, 0)
    assert read.pairs[Pair("1", "None")].wait.counts[:5] == [0, 0, 0, 0, 2]
    assert tally_of({"pairs": 5}).pairs == {}


def test_a_tally_keeps_five_hundred_pairs_and_the_rest_as_other() -> None:
    made = Tally()
    for number in range(3000):
        counts = made.of(f"guild-{number}", "n").runs
        counts["SUCCESS"] = counts.get("SUCCESS", 0) + 1
    assert len(made.pairs) == MAX_PAIRS + 1
    assert made.pairs[OTHER].runs == {"SUCCESS": 3000 - MAX_PAIRS}
    assert made.run_cnt == 3000
    assert len(bson.encode(made.document())) < 200_000


def test_only_admitted_pairs_are_shown_and_the_rest_waits_or_is_other() -> None:
    made = tally(a=1, b=2, c=4)
    admitted = {Pair("q", "a"): None}
    waiting = made.limited(admitted, is_full=False)
    assert set(waiting.pairs) == {Pair("q", "a")}, "b may be admitted: in OTHER, it would leave OTHER again"
    full = made.limited(admitted, is_full=True)
    assert (full.pairs[OTHER].runs, full.run_cnt) == ({"SUCCESS": 6}, 7)
    assert made.pairs[Pair("q", "a")].runs == {"SUCCESS": 1}, "the tally itself has not changed"


def test_each_count_is_a_change() -> None:
    made = Tally()
    assert made.revision == 0
    made.of("q", "n")
    assert made.revision == 1


def test_bounds_ascend() -> None:
    assert list(BOUNDS) == sorted(set(BOUNDS))
