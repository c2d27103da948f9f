"""Breakers: failures in a row hold back a queue or the tasks of a name."""
