"""Limits: permits bound the runs at once, and the starts in a window of time."""
