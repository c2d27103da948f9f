"""Executors: child processes in which isolated handlers run. The worker process keeps the leases and the outcomes."""
