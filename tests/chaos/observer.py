"""The observer: follows the collection `tasks` by a change stream with post-images, and keeps every version.

A process of its own, which no nemesis touches. It goes on from its resume token through failovers; if the database
can no longer give what lies behind the token, it counts a gap, and the run proves nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bson
from pymongo import MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from tests.chaos.history import Document, History

#: Where the harness leaves the mark behind which nothing follows.
MARKS = "marks"
END = "end"
READY = "ready"
GAPS = "observer.json"
#: The history behind the token or an image is gone, or the token is of no use.
_LOST = frozenset({47, 222, 260, 280, 286})
_PIPELINE: list[dict[str, Any]] = [
    {"$match": {"ns.coll": {"$in": ["tasks", MARKS]}}},
    {
        "$unset": [
            "updateDescription",
            "fullDocument.params",
            "fullDocument.task_state.worker_states.returns",
        ]
    },
]


def prepare(client: MongoClient[Document], database: str) -> None:
    """Let the server keep the images that the observer reads."""
    client[database].command("collMod", "tasks", changeStreamPreAndPostImages={"enabled": True})


def observe(uri: str, database: str, history: History) -> int:
    """Write all versions down until the end's mark comes; return how often some may have been missed."""
    client: MongoClient[Document] = MongoClient(
        uri, tz_aware=True, serverSelectionTimeoutMS=2000, socketTimeoutMS=20000
    )
    token: Mapping[str, Any] | None = None
    gaps = 0
    with client, history.versions_path.open("ab") as file:
        while True:
            try:
                with client[database].watch(
                    _PIPELINE, full_document="required", resume_after=token, max_await_time_ms=500, batch_size=2000
                ) as stream:
                    while True:
                        event = stream.try_next()
                        if event is not None:
                            if event["ns"]["coll"] == MARKS:
                                if event["documentKey"]["_id"] == END:
                                    return gaps
                                history.folder.joinpath(READY).touch()
                            else:
                                file.write(bson.encode(_version(event)))
                        else:
                            file.flush()
                        token = stream.resume_token
            except OperationFailure as error:
                if error.code in _LOST:
                    gaps += 1
                    token = None
                time.sleep(0.05)
            except PyMongoError:
                time.sleep(0.05)


def _version(event: Mapping[str, Any]) -> Document:
    version = {"_id": event["documentKey"]["_id"], "at": event["wallTime"], "cluster_time": event["clusterTime"]}
    if event["operationType"] != "delete":
        version["document"] = event["fullDocument"]
    return version


def main(given: Sequence[str] | None = None) -> None:
    """Observe until the mark of the end comes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--uri", required=True)
    parser.add_argument("--database", required=True)
    parser.add_argument("--folder", required=True, help="the history's")
    arguments = parser.parse_args(given)
    history = History(Path(arguments.folder))
    gaps = observe(arguments.uri, arguments.database, history)
    history.folder.joinpath(GAPS).write_text(json.dumps({"observer_gaps": gaps}))


if __name__ == "__main__":
    main()
