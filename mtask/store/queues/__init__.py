"""Queues: their controls, and the permits of their limits."""
