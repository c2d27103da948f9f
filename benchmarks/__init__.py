"""What mtask costs above the database work itself: `python -m benchmarks --help`.

Each benchmark measures a raw ceiling, the same database work done by bare PyMongo calls, in turn with mtask and in
the same run, and reports mtask against it. It reports; it never passes or fails by the clock.
"""
