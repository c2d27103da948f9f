"""Admission: decides whether a task may be claimed now. A pause, a limit or the quarantine can forbid the claim."""
