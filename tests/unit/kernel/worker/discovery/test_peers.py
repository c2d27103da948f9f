"""The ranks of workers: alike for all who know the same workers, fair, and steady when one comes or goes."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import pytest

from mtask.kernel.document.identity import BUCKET_CNT, bucket_of
from mtask.kernel.worker.discovery.fleet import Peers

IDS = [f"work:{number}" for number in range(3_000)]


def worker(worker_id: str, *names: str, **fields: Any) -> dict[str, Any]:
    return {"_id": worker_id, "concurrency": 10, "names": list(names or ["work"]), "status": "running", **fields}


def peers_of(worker_id: str, *workers: dict[str, Any]) -> Peers:
    peers = Peers(worker_id)
    peers.update(workers)
    return peers


def fleet(size: int) -> dict[str, Peers]:
    """Return how each of so many workers sees the others."""
    workers = [worker(f"w{number}") for number in range(size)]
    return {known["_id"]: peers_of(known["_id"], *workers) for known in workers}


def simple_ranks(worker_id: str, worker_ids: list[str]) -> list[int]:
    """Return the worker's rank for each bucket, by the rule as it is written, bucket by bucket."""
    workers = sorted(worker_ids)
    scored = {
        name: struct.unpack(f"<{BUCKET_CNT}I", hashlib.shake_128(name.encode()).digest(4 * BUCKET_CNT))
        for name in workers
    }
    room = dict.fromkeys(workers, -(-BUCKET_CNT // len(workers)))
    ranks = []
    for bucket in range(BUCKET_CNT):
        order = sorted(workers, key=lambda name: -scored[name][bucket])
        first = next(name for name in order if room[name])
        room[first] -= 1
        order.remove(first)
        ranks.append(min([first, *order].index(worker_id), 255))
    return ranks


@pytest.mark.parametrize("size", [2, 3, 64, 300])
def test_ranks_are_those_of_the_rule_bucket_by_bucket(size: int) -> None:
    worker_ids = [f"host-{number}" for number in range(size)]
    for name in (worker_ids[0], worker_ids[-1]):
        peers = peers_of(name, *(worker(worker_id) for worker_id in worker_ids))
        of_bucket = {bucket_of(task_id): peers.rank(task_id, "work") for task_id in IDS}
        ranks = simple_ranks(name, worker_ids)
        assert len(of_bucket) > BUCKET_CNT / 2
        assert of_bucket == {bucket: ranks[bucket] for bucket in of_bucket}


def test_scores_of_workers_that_are_gone_are_forgotten() -> None:
    peers = peers_of("me", *(worker(f"w{number}") for number in range(10)))
    assert peers.last("work") == 10
    assert peers.rank(IDS[0], "work") <= 10
    peers.update([worker("w3")])
    assert peers._digests.keys() == {"me", "w3"}


def test_ranks_that_were_prepared_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [worker("one"), worker("two", "work", "other")]
    peers, expected = Peers("me"), peers_of("me", *workers)
    ranks = [expected.rank(task_id, "work") for task_id in IDS]
    peers.prepare(workers, ["work", "alone"])
    monkeypatch.setattr("mtask.kernel.worker.discovery.fleet.ranks_among", None)
    peers.update(workers)
    assert [peers.rank(task_id, "work") for task_id in IDS] == ranks


def test_only_what_changes_a_rank_is_news() -> None:
    known = [worker("me"), worker("one", "work", "mail"), worker("two", running_cnt=3)]
    peers = peers_of("me", *known)
    assert not peers.is_news(known)
    assert not peers.is_news([known[2], {**known[1], "running_cnt": 7, "now": 1, "concurrency": 4}])
    changed: list[dict[str, Any]] = [
        {"concurrency": 0},
        {"status": "stopping"},
        {"names": ["work"]},
        {"names": ("work", "mail", "more")},
        {"_id": "three"},
    ]
    assert all(peers.is_news([known[0], {**known[1], **fields}, known[2]]) for fields in changed)
    assert peers.is_news(known[:2])
    assert peers.is_news([*known, worker("three", "other")])


def test_first_worker_that_never_appeals_and_the_end_of_the_last_one_are_news() -> None:
    alike, old = worker("one", appeal_cnt=0), worker("one")
    peers = peers_of("me", alike)
    assert not peers.is_news([{**alike, "appeal_cnt": 9}])
    assert peers.is_news([old])
    peers.update([old])
    assert peers.is_news([alike])


def test_queues_in_which_another_serves_the_same_names_are_news() -> None:
    peers = Peers("me", ["a"])
    peers.update([worker("one", queues=["a"])])
    assert peers.is_news([worker("one", queues=["a", "b"])])
    assert not peers.is_news([worker("one", queues=("a",))])


def test_names_that_the_same_workers_serve_share_one_list_of_them() -> None:
    """So the ranks are computed, and compared, once for all of these names."""
    names = [f"name-{number}" for number in range(50)]
    peers = peers_of("me", worker("one", *names), worker("two", *reversed(names)), worker("three", "name-1", "alone"))
    distinct = {id(others) for others in peers._others.values()}
    assert sorted(set(peers._others.values())) == [("one", "three", "two"), ("one", "two"), ("three",)]
    assert len(distinct) == 3
    assert peers._others["name-1"] == ("one", "three", "two")
    assert len(peers.shares(names)) == 2


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40])
def test_each_worker_has_another_rank_for_a_task_and_each_ranks_first_for_its_part(size: int) -> None:
    seen = fleet(size).values()
    ranks = [[peers.rank(task_id, "work") for peers in seen] for task_id in IDS]
    assert all(sorted(found) == list(range(size)) for found in ranks)
    marked = [peers.shares(["work"]) for peers in seen]
    if size == 1:
        assert marked == [[]]
        return
    buckets = [buckets for [(names, buckets)] in marked if names == ["work"]]
    assert [len(digits) for digits in buckets] == [BUCKET_CNT] * size
    assert all([digits[bucket] for digits in buckets].count("1") == 1 for bucket in range(BUCKET_CNT))
    assert max(digits.count("1") for digits in buckets) <= -(-BUCKET_CNT // size)


def test_share_is_what_the_worker_ranks_first_for() -> None:
    peers = fleet(3)["w1"]
    [(_, buckets)] = peers.shares(["work"])
    assert all((buckets[bucket_of(task_id)] == "1") == (peers.rank(task_id, "work") == 0) for task_id in IDS)


def test_each_task_is_in_the_shares_of_two_workers_if_the_first_two_are_asked_for() -> None:
    seen = fleet(6)
    shares = {name: peers.shares(["work"], 2)[0][1] for name, peers in seen.items()}
    for task_id in IDS:
        hearing = {name for name, buckets in shares.items() if buckets[bucket_of(task_id)] == "1"}
        assert hearing == {name for name, peers in seen.items() if peers.rank(task_id, "work") < 2}
        assert len(hearing) == 2


def test_only_names_of_a_fleet_are_narrowed() -> None:
    """Of a name that few others serve, or that others serve in other queues, a worker hears all."""
    peers = Peers("me", ["default"])
    fleet = [worker(f"w{number}", "work", queues=["default"]) for number in range(3)]
    two = [worker(f"m{number}", "mail", queues=["default"]) for number in range(2)]
    far = [worker(f"f{number}", "far", queues=["elsewhere"]) for number in range(3)]
    peers.update([*fleet, *two, *far])
    shares = {name: buckets for names, buckets in peers.shares(["work", "mail", "far"], 2, 3) for name in names}
    assert "0" in shares["work"]
    assert set(shares["mail"]) == set(shares["far"]) == {"1"}
    assert "0" in peers.shares(["mail"], 2)[0][1]


def test_workers_of_an_older_version_do_not_appeal() -> None:
    assert peers_of("me", worker("a", appeal_cnt=0), worker("b", appeal_cnt=3)).do_all_appeal
    assert not peers_of("me", worker("a", appeal_cnt=0), worker("b")).do_all_appeal
    assert not peers_of("me", worker("a", appeal_cnt=None)).do_all_appeal


def test_what_ranks_second_is_spread_over_all_others() -> None:
    seen = fleet(5)
    first = [task_id for task_id in IDS if seen["w0"].rank(task_id, "work") == 0]
    second = [next(name for name, peers in seen.items() if peers.rank(task_id, "work") == 1) for task_id in first]
    assert len(first) > 400
    assert all(second.count(name) > len(first) / 8 for name in ("w1", "w2", "w3", "w4"))


def test_who_stays_keeps_nearly_all_it_ranked_first_for_when_one_goes() -> None:
    before, after = fleet(8), fleet(7)
    for name, peers in after.items():
        own = [task_id for task_id in IDS if before[name].rank(task_id, "work") == 0]
        assert len([task_id for task_id in own if peers.rank(task_id, "work") == 0]) > 0.95 * len(own)


def test_only_live_workers_that_serve_the_name_and_take_something_count() -> None:
    others = [
        worker("paused", concurrency=0),
        worker("stopping", status="stopping"),
        worker("elsewhere", "other"),
        {"_id": "odd", "concurrency": 5, "names": "work"},
        {"_id": "none", "concurrency": 5},
        worker("me"),
    ]
    peers = peers_of("me", *others)
    assert {peers.rank(task_id, "work") for task_id in IDS} == {0}
    assert peers.last("work") == 0
    assert peers.last("other") == 3
    assert peers.shares(["work"]) == []


def test_names_that_others_serve_are_shared_and_the_rest_is_all_its_own() -> None:
    peers = peers_of("me", worker("one", "work", "mail"), worker("two", "mail", "import"))
    shares = {tuple(names): buckets for names, buckets in peers.shares(["work", "mail", "import", "alone"])}
    assert set(shares) == {("work",), ("mail",), ("import",), ("alone",)}
    assert shares["alone",] == "1" * BUCKET_CNT
    assert [round(BUCKET_CNT / shares[name,].count("1")) for name in ("work", "mail", "import")] == [2, 3, 2]
    same = peers_of("me", worker("one", "work", "mail"))
    [(names, buckets)] = same.shares(["work", "mail"])
    assert (names, buckets.count("1")) == (["work", "mail"], BUCKET_CNT // 2)


def test_names_that_others_serve_in_other_queues_are_not_shared() -> None:
    peers = Peers("me", ["a", "b"])
    peers.update(
        [
            worker("alike", "work", "mail", queues=["b", "a"]),
            worker("other", "mail", queues=["a"]),
            worker("odd", "import", queues="a"),
        ]
    )
    shares = {name: buckets for names, buckets in peers.shares(["work", "mail", "import"]) for name in names}
    assert {name: round(BUCKET_CNT / buckets.count("1")) for name, buckets in shares.items()} == {
        "work": 2,
        "mail": 1,
        "import": 1,
    }
    assert peers.shares(["mail", "import"]) == []
    assert {peers.rank(task_id, "mail") for task_id in IDS} == {0, 1, 2}
    assert [name for name in ("work", "mail", "import", "unknown") if peers.is_divided(name)] == ["work", "unknown"]


def test_worker_that_comes_and_goes_changes_the_ranks() -> None:
    peers = peers_of("me", worker("other"))
    mine = [task_id for task_id in IDS if peers.rank(task_id, "work") == 0]
    assert 0.4 < len(mine) / len(IDS) < 0.6
    peers.update([])
    assert {peers.rank(task_id, "work") for task_id in IDS} == {0}
    peers.update([worker("other")])
    assert [task_id for task_id in IDS if peers.rank(task_id, "work") == 0] == mine
