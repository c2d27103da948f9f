"""The examples of monitoring: queries name metrics that exist, the rules hold, the scaler's query reads an index."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml
from bson import json_util
from pymongo import MongoClient

from mtask import Client
from mtask.features.metrics import prometheus as exposition
from mtask.features.metrics.client import FleetMetrics, QueueMetrics, WorkerMetrics
from mtask.kernel.document.status import TaskStatus
from mtask.kernel.document.task import WorkerDocument
from mtask.kernel.worker.process.counts import Tally
from mtask.search.counts import Count
from tests import build
from tests.workers import ROOT

FOLDER = ROOT / "examples" / "monitoring"
NOW = datetime(2030, 1, 1, tzinfo=UTC)
_METRIC = re.compile(r"\bmtask_\w+")
_MATCHER = re.compile(r"(mtask_\w+)\{([^}]*)\}")


def promtool(*arguments: str, text: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("promtool")
    assert program, "tools/setup.sh dev installs Debian's package prometheus, which brings promtool"
    return subprocess.run([program, *arguments], cwd=FOLDER, input=text, capture_output=True, timeout=60, check=False)


def fleet() -> FleetMetrics:
    """Return metrics of which each one has a value."""
    tally = Tally()
    counts = tally.of("mail", 'a "hostile" \\ name\n')
    counts.runs |= {"SUCCESS": 3, "FAIL": 1}
    counts.wait.observe(0.2)
    counts.run.observe(99_999.0)
    tally.leases_lapsed, tally.claims_lost = 2, 5
    tally.lateness.observe(1.5)
    worker = WorkerDocument.model_validate(
        build.worker("w1", NOW, queues=["mail"], names=["n"], concurrency=4, running_cnt=1)
    )
    queue = QueueMetrics("mail", {status: Count(2) for status in TaskStatus}, timedelta(seconds=7))
    return FleetMetrics(NOW, tally, [WorkerMetrics(worker, 4, 0.5)], [queue], NOW - timedelta(seconds=3))


def exposed() -> dict[str, set[str]]:
    """Return the labels of each metric that is exposed."""
    found: dict[str, set[str]] = {}
    for family in exposition.of_fleet(fleet()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def queries() -> list[str]:
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += [each["definition"] for each in dashboard["templating"]["list"] if "definition" in each]
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    return found + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_every_query_names_metrics_and_labels_that_exist() -> None:
    known = exposed()
    named: set[str] = set()
    for query in queries():
        assert _METRIC.findall(query), query
        named.update(_METRIC.findall(query))
        for metric, matchers in _MATCHER.findall(query):
            assert set(re.findall(r"(\w+)=", matchers)) <= known[metric], query
        for grouped in re.findall(r"by \(([^)]*)\)", query):
            labels = {label.strip() for label in grouped.split(",")}
            assert labels <= {label for metric in _METRIC.findall(query) for label in known[metric]}, query
    assert named <= set(known)
    # What is promised, and nothing else but what docs/metrics.md lists.
    page = (ROOT / "docs" / "metrics.md").read_text()
    families = {family.name for family in exposition.of_fleet(fleet())}
    shown = {name for family in families for name in (family, f"{family}_total") if f"`{name}" in page}
    assert {name.removesuffix("_total") for name in shown} == families


def test_the_rules_hold_what_they_say() -> None:
    for arguments in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        ended = promtool(*arguments)
        assert ended.returncode == 0, ended
    ended = promtool("check", "config", "prometheus.yml")
    assert ended.returncode == 0, ended
    tested = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    fired = {case["alertname"] for test in tested for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules}, "each rule fires in a test"


def test_prometheus_finds_nothing_to_complain_of() -> None:
    text = exposition.text_of(list(exposition.of_fleet(fleet())))
    ended = promtool("check", "metrics", text=text)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def scaler() -> dict[str, Any]:
    [scaled, _] = yaml.safe_load_all((FOLDER / "keda-scaledobject.yaml").read_text())
    [trigger] = scaled["spec"]["triggers"]
    assert trigger["type"] == "mongodb"
    found: dict[str, Any] = trigger["metadata"]
    return found


def test_the_query_of_the_scaler_counts_due_and_running_tasks_in_an_index(mongo_uri: str, database_name: str) -> None:
    settings = scaler()
    assert json_util.dumps(json_util.loads(settings["query"]), json_options=json_util.CANONICAL_JSON_OPTIONS)
    query = json_util.loads(settings["query"])
    with Client(mongo_uri, database=database_name) as client, MongoClient[dict[str, Any]](mongo_uri) as mongo:
        for number in range(30):
            client.publish("n", key=f"due-{number}", queue="mail")
        client.publish("n", key="running", queue="mail")
        client.publish("n", key="later", queue="mail", delay=timedelta(days=1))
        client.publish("n", key="elsewhere", queue="other")
        tasks = mongo[database_name][settings["collection"]]
        tasks.update_one({"_id": "n:due-0"}, {"$set": {"task_state.status": "SUCCESS"}})
        tasks.update_one({"_id": "n:due-0"}, {"$unset": {"task_state.next_preempt_time": 1}})
        tasks.update_one({"_id": "n:running"}, {"$set": {"task_state.status": "RUNNING"}})
        tasks.update_one(
            {"_id": "n:running"}, [{"$set": {"task_state.next_preempt_time": {"$add": ["$$NOW", 30_000]}}}]
        )
        assert tasks.count_documents(query) == 30
        stages = [{"$match": query}, {"$group": {"_id": 1, "n": {"$sum": 1}}}]
        plan = mongo[database_name].command(
            "explain", {"aggregate": "tasks", "pipeline": stages, "cursor": {}}, verbosity="executionStats"
        )
    text = json.dumps(plan, default=str)
    assert "mtask_discovery" in text
    assert "COLLSCAN" not in text
    examined = [int(number) for number in re.findall(r'"totalDocsExamined": (\d+)', text)]
    keys = [int(number) for number in re.findall(r'"totalKeysExamined": (\d+)', text)]
    assert max(keys) <= 33, "the finished tasks and the other queues are not looked at"
    assert max(examined) <= 31


@pytest.mark.parametrize("name", ["prometheus.yml", "alerts.yml", "alerts_test.yml", "dashboard.json"])
def test_the_readme_names_each_file(name: str) -> None:
    assert f"({name})" in (FOLDER / "README.md").read_text()
