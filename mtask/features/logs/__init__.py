"""Kept logs: the last lines that each run has written."""
