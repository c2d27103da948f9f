"""Upkeep: the firings of schedules, and the retention of finished tasks."""
