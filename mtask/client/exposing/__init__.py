"""Exposing metrics to Prometheus. Only this package imports prometheus-client, the extra `metrics`."""
