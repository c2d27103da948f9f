"""Schedules: they publish tasks again and again."""
