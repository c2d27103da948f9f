"""Upkeep: makes the firings of schedules, and removes finished tasks by the retention of their queues."""
