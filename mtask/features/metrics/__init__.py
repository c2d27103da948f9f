"""Metrics of all workers and queues: counted, stored, and shown to Prometheus and in `mtask top`."""
