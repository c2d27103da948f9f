"""Deliveries of callbacks: what this worker may call, and how it sends a message."""
