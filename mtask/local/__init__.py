"""The embedded mongod: a real MongoDB for development, demos and tests, without an installation.

`start` and `stop` control the server of a folder. All processes of the user share this server, and it outlives them.
`temporary` and `ReplicaSet` are for tests. They make replica sets of several nodes, in new folders. A test can kill the
nodes.
Every server listens on 127.0.0.1 only. Only a `ReplicaSet` with `Security` asks for passwords. To every other server,
any user of the machine can connect.
"""

from mtask.local.folder import LocalServer, default_folder, find_mongod
from mtask.local.node import Node, Security
from mtask.local.replica_set import ReplicaSet, temporary
from mtask.local.server import running, start, status, stop

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
