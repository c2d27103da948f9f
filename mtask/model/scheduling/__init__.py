"""Schedules: their documents, and the triggers that tell the next firing."""
