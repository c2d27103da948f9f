"""The cost of mtask above the database work itself: `python -m benchmarks --help`.

Each benchmark runs mtask and a raw ceiling in turn, and reports the ratio. The raw ceiling is the same database work
done by bare PyMongo calls. A benchmark never passes or fails by the clock.

- `cases/`: the benchmarks, one module each.
- `measuring/`: the server, the workers and the raw loops; time, counters and costs.
- `report/`: figures, tables, pictures and JSON.
"""
