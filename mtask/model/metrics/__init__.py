"""Metrics: what a worker counts, how counts add up, and the documents that hold them."""
