"""The comparison with other queues works without them: parsing, tables, what is missing, and mtask measured itself."""

from __future__ import annotations

import json
import math
import uuid
from pathlib import Path

import pytest
from pymongo import MongoClient

from benchmarks.__main__ import main
from benchmarks.cases import peers
from benchmarks.cases.peers import Comparison, Measured, Servers
from benchmarks.measuring.fleet import ROOT
from benchmarks.peers import catalogue, installing, lines, picture, report, servers, trials
from benchmarks.peers.catalogue import MONGO, MTASK, PEERS, POSTGRES, REDIS, Peer
from benchmarks.peers.lines import Survival
from benchmarks.peers.processes import cpu_of_tree, tree_of
from benchmarks.peers.servers import PeerServer
from benchmarks.peers.trials import Bench, Drain, Quiet, Sizes
from mtask.errors import InvalidInput
from tests.mongo import Client as Mongo

SIZES = Sizes(tasks=30, longest=20.0, window=1.0, patience=5.0, lease=2)
SECOND, MILLI = 1_000_000_000, 1_000_000


def peer(name: str) -> Peer:
    return next(one for one in PEERS if one.name == name)


def drained(rate: float) -> Drain:
    return Drain(rate, 100.0, 200.0, math.nan, 500.0)


COMPARISON = Comparison(
    SIZES,
    2,
    [
        Measured(
            peer(MTASK),
            drains=[drained(2_000.0), drained(3_000.0)],
            kept_drains=[drained(2_000.0), drained(4_000.0)],
            quiets=[Quiet(5.0, 9.0, 0.5, 0.25, 2.0)],
            worker_killed=Survival(24, 24, 0, 6, 6, 60.5),
            worker_killed_lasting=Survival(24, 24, 1, 6, 6, 6.25),
            server_killed=Survival(10, 10),
        ),
        Measured(
            peer("bullmq"),
            drains=[drained(4_000.0), drained(4_000.0)],
            durable_drains=[drained(400.0)],
            kept_drains=[drained(1_000.0), drained(1_000.0)],
            worker_killed=Survival(24, 4, 0, 20),
            server_killed=Survival(10, 0),
            server_killed_durable=Survival(10, 10),
        ),
        Measured(
            peer("rq"), failures=["not measured: redis-server is not installed. Run: apt-get install redis-server"]
        ),
    ],
    {"MongoDB": "6.0.5", "Redis": "7.0.15"},
    (1.0, 2.5),
)


class SharedMongo(PeerServer):
    """The session's mongod, which is neither killed nor stopped."""

    title = "MongoDB"

    def __init__(self, uri: str, client: Mongo) -> None:
        self._uri = uri
        self._client = client

    @property
    def pid(self) -> int:
        return int(self._client.admin.command("serverStatus")["pid"])

    @property
    def version(self) -> str:
        return str(self._client.server_info()["version"])

    def fresh(self) -> str:
        base, _, options = self._uri.partition("?")
        return f"{base.rstrip('/')}/mtask_peers_{uuid.uuid4().hex[:8]}?{options}"

    def drop(self, uri: str) -> None:
        name = uri.partition("?")[0].rpartition("/")[2]
        with MongoClient[dict[str, object]](self._uri) as client:
            client.drop_database(name)

    def commands(self) -> float:
        return float(self._client.admin.command("serverStatus")["network"]["numRequests"])

    def kill(self) -> None:
        raise AssertionError("the session's mongod is shared")

    def start(self) -> None:
        raise AssertionError("the session's mongod is shared")

    def stop(self) -> None:
        """Leave it running."""


# --- what handlers noted ------------------------------------------------------------------------------------------


def test_notes_are_read_up_to_a_line_that_is_still_being_written() -> None:
    notes = lines.notes_in("b 1 5 10\nb 2 0 20\ne 1 0 30\nb 3 0")
    assert [(note.kind, note.number, note.sent, note.at) for note in notes] == [
        ("b", 1, 5, 10),
        ("b", 2, 0, 20),
        ("e", 1, 0, 30),
    ]


def test_pace_leaves_out_the_tasks_that_warm_up() -> None:
    instants = [0, 5 * SECOND, *(10 * SECOND + number * 100 * MILLI for number in range(11))]
    begun = lines.starts(lines.notes_in("".join(f"b {number} 0 {at}\n" for number, at in enumerate(instants))))
    assert lines.pace(begun, 2) == pytest.approx(10.0)
    assert math.isnan(lines.pace(begun, len(begun)))


def test_latency_is_from_the_publish_call_to_the_first_start() -> None:
    begun = lines.starts(lines.notes_in(f"b 1 {MILLI} {9 * MILLI}\nb 1 {MILLI} {3 * MILLI}\nb 2 0 {MILLI}\n"))
    assert lines.latencies(begun) == [2.0]


def test_survival_tells_lost_interrupted_resumed_and_doubled_tasks_apart() -> None:
    notes = lines.notes_in(
        f"b 0 0 1\ne 0 0 2\nb 1 0 3\nb 2 0 4\n"  # killed at 5
        f"b 0 0 {SECOND}\ne 0 0 {SECOND}\nb 1 0 {3 * SECOND + 5}\ne 1 0 {4 * SECOND}\n"
    )
    found = lines.survival(notes, 4, 5)
    assert (found.lost, found.twice, found.interrupted, found.resumed) == (2, 1, 2, 1)
    assert found.seconds == pytest.approx(3.0)


# --- the report ---------------------------------------------------------------------------------------------------


def test_tables_tell_medians_ratios_losses_and_what_was_not_measured() -> None:
    pace, keeping, publishing, waiting, worker, server = report.sheets(COMPARISON)
    assert list(pace.rows[0]) == ["mtask (MongoDB)", "2,500", "1.00", "100", "200"]
    assert list(pace.rows[1])[:3] == ["BullMQ (Redis)", "4,000", "0.625"]
    assert list(pace.rows[2])[:3] == ["BullMQ (Redis), fsync always", "400", "-"]
    assert list(keeping.rows[0])[:3] == ["mtask (MongoDB)", "3,000", "1.00"]
    assert list(keeping.rows[1])[:3] == ["BullMQ (Redis), fsync always", "1,000", "3.00"]
    assert list(publishing.rows[0])[1:] == ["-", "500"]
    assert list(waiting.rows[0])[1:] == ["5.00", "9.00", "0.500", "0.250", "2.00"]
    assert list(worker.rows[0])[1:] == ["0 of 24", "60.5", "0 of 24, 1 done twice", "6.25"]
    assert list(worker.rows[1])[1:] == ["20 of 24", "not yet", "-", "-"]
    assert list(server.rows[1])[1:] == ["10 of 10", "0 of 10"]
    assert all(
        "RQ" not in row[0] for sheet in (pace, keeping, publishing, waiting, worker, server) for row in sheet.rows
    )
    assert "RQ (Redis): not measured: redis-server is not installed" in report.markdown(COMPARISON)


def test_report_is_json_without_nan_tables_and_a_picture_with_text(tmp_path: Path) -> None:
    json_path, table_path, picture_path = report.write(COMPARISON, {"cores": 2}, tmp_path)
    written = json.loads(json_path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert [one["name"] for one in written["peers"]] == [MTASK, "bullmq", "rq"]
    assert written["peers"][1]["drains"][0]["bulk_rate"] is None
    assert "| mtask (MongoDB) | 2,500 |" in table_path.read_text()
    drawn = picture_path.read_text()
    assert all(text in drawn for text in ("BullMQ, Redis, fsync always", "mtask, MongoDB", "2,500"))
    assert [bar.is_durable for bar in picture.bars(COMPARISON)] == [False, True, True]


# --- the catalogue ------------------------------------------------------------------------------------------------


def test_every_peer_has_a_program_a_pinned_version_and_words_for_its_settings() -> None:
    for one in PEERS:
        suffix = ".mjs" if one.language == "Node" else ".py"
        assert (installing.PROGRAMS / f"{one.program}{suffix}").is_file(), one.name
        assert one.version[0].isdigit(), one.name
        assert one.server in {MONGO, REDIS, POSTGRES}
        assert one.setting
        assert one.usual


def test_chosen_peers_come_beside_mtask_and_unknown_ones_are_refused() -> None:
    assert [one.name for one in peers.chosen("rq, bullmq")] == [MTASK, "rq", "bullmq"]
    assert [one.name for one in peers.chosen(None)] == list(catalogue.NAMES)
    for nonsense in ("rq,resque", " , "):
        with pytest.raises(InvalidInput, match=r"--peers: .*Choose from mtask, celery-redis"):
            peers.chosen(nonsense)


def test_command_line_refuses_peers_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", "--peers", "resque"]) == 2
    assert "no peer is called resque" in capsys.readouterr().err


# --- what is missing, and what is there ---------------------------------------------------------------------------


def test_missing_server_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(servers.MissingServer, match="Run: apt-get install redis-server"):
        servers.Redis(tmp_path)


def test_processes_of_a_tree_are_counted_together() -> None:
    assert tree_of(1)[0] == 1
    assert cpu_of_tree(2**22 + 1) == 0.0


def test_peers_that_cannot_be_had_are_noted_and_mtask_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mongo_uri: str, mongo: Mongo
) -> None:
    pinned = tmp_path / "requirements"
    pinned.mkdir()
    (pinned / "rq.txt").write_text("no-such-package==1.0\n")
    monkeypatch.setattr(installing, "REQUIREMENTS", pinned)
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    def missing() -> PeerServer:
        raise servers.missing("postgres", "postgresql")

    there = Servers({MONGO: lambda: SharedMongo(mongo_uri, mongo), POSTGRES: missing}, tmp_path, tmp_path)
    without = Peer("other", "Other", POSTGRES, "Python", "peer_mtask", "mtask/mtask", "-", "-", "-")
    monkeypatch.setattr(trials, "latency_and_idle", lambda _bench, _sizes: Quiet(1.0, 1.0, 0.0, 0.0, 0.0))
    found = peers.measure([peer(MTASK), peer("rq"), without], there, SIZES, 1, lambda _: None, has_kills=False)
    mine, installed, served = found.measured
    assert mine.failures == []
    assert mine.drains[0].rate > 0
    assert mine.kept_drains[0].rate > 0
    assert mine.drains[0].bulk_rate > 0
    assert "rq could not be installed" in installed.failures[0]
    assert served.failures == ["not measured: postgres is not installed. Run: apt-get install postgresql"]
    assert [one.is_there for one in found.measured] == [True, False, False]


@pytest.mark.long
def test_tasks_of_a_killed_worker_are_all_done_after_the_lease(tmp_path: Path, mongo_uri: str, mongo: Mongo) -> None:
    bench = Bench(peer(MTASK), SharedMongo(mongo_uri, mongo), tmp_path, tmp_path)
    found = trials.kill_worker(bench, Sizes(30, 20.0, 1.0, 30.0, 2), is_lasting=True)
    assert (found.lost, found.twice) == (0, 0)
    assert found.interrupted == found.resumed > 0


def test_page_names_every_peer_with_its_version_and_its_settings() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text()
    for one in PEERS:
        row = next(line for line in page.splitlines() if line.startswith("| ") and one.setting in line)
        assert one.title in row
        # mtask's own version moves on with each release, the page with each run.
        assert one.version in row or one.name == MTASK
    assert "@@" not in page
