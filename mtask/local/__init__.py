"""The embedded mongod: a real MongoDB for development, demos and tests, without an installation.

`start` and `stop` keep one server per folder, shared by every process of the user and alive after all of them.
`temporary` and `ReplicaSet` are for tests: their own folder, any number of nodes, nodes that can be killed.
Every server listens on 127.0.0.1 only. Without `Security`, which a `ReplicaSet` may have, there is no password: any
user of the machine can reach it.
"""

from mtask.local.find import find_mongod
from mtask.local.folder import LocalServer, default_folder
from mtask.local.node import Node
from mtask.local.replica_set import ReplicaSet
from mtask.local.security import Security
from mtask.local.server import running, start, status, stop
from mtask.local.temporary import temporary

__all__ = [
    "LocalServer",
    "Node",
    "ReplicaSet",
    "Security",
    "default_folder",
    "find_mongod",
    "running",
    "start",
    "status",
    "stop",
    "temporary",
]
