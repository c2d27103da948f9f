"""For tests of your own tasks: an app's handlers run in this process, on a real MongoDB, until nothing is left to do.

With pytest, say `pytest_plugins = ["mtask.testing.fixtures"]` in conftest.py; the fixture `mtask_bench` gives a
database of its own to each test:

    def test_report(mtask_bench):
        bench = mtask_bench(app)
        bench.client.publish("report", {"kind": "sales"}, key="2030-01")
        bench.run()
        assert bench.client.get("report", "2030-01").returns == "sales reported"

Without it: `with bench(app) as made: ...`. The server is the embedded mongod (the extra `local`), started once for the
process, or the one that MTASK_TEST_URI names.
"""

from mtask.testing.bench import Bench, Stuck, bench

__all__ = ["Bench", "Stuck", "bench"]
