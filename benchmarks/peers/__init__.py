"""mtask beside other task queues, on one machine and in one run: `python -m benchmarks peers --help`.

- `catalogue.py`: the peers, how each is installed and started, and its settings.
- `programs/`: one small program for each peer. It is a worker or a publisher, by its arguments.
- `requirements/`, `programs/package.json`: the versions, pinned.
- `installing.py`, `servers.py`, `running.py`: environments under `build/`, the servers, the processes.
- `trials.py`: the measurements. `lines.py`: what handlers noted.
- `report.py`, `picture.py`: tables and the picture.

Every handler notes its start by one short line, which it appends to a file with one system call. This is the same for
all peers, costs 2 to 5 µs, and goes through no server.
"""
