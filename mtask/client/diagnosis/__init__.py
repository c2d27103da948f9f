"""Diagnosis: what is wrong, and what a task waits for."""
