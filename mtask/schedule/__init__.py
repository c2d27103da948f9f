"""Recurring publication and maintenance, on APScheduler's triggers: the place kept for schedules."""
