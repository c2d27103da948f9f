"""Upkeep: makes the firings of schedules, and removes finished tasks that their queues need not keep."""
