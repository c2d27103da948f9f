"""Admission: decides whether a task may be claimed now, by pauses, limits and quarantine."""
