"""Run an app's handlers in tests: in this process, on a real MongoDB, until no task is due.

With pytest, write `pytest_plugins = ["mtask.testing.fixtures"]` in conftest.py. The fixture `mtask_bench` gives each
test a database of its own:

    def test_report(mtask_bench):
        bench = mtask_bench(app)
        bench.client.publish("report", {"kind": "sales"}, key="2030-01")
        bench.run()
        assert bench.client.get("report", "2030-01").returns == "sales reported"

`CallbackReceiver` receives callbacks, and checks their signatures: see there.

Without pytest: `with bench(app) as made: ...`. MTASK_TEST_URI names the server for the tests. Without MTASK_TEST_URI,
the embedded mongod of the extra `local` is started, once for the process.
"""

from mtask.features.callbacks.testing import CallbackReceiver, NotGenuine, ReceivedCallback, verify
from mtask.testing.bench import Bench, Stuck, bench

__all__ = ["Bench", "CallbackReceiver", "NotGenuine", "ReceivedCallback", "Stuck", "bench", "verify"]
