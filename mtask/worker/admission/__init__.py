"""Admission: whether a task may be taken now: pauses, limits, quarantine."""
