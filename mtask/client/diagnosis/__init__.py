"""Diagnosis: finds problems and their remedies, and explains why a task waits."""
