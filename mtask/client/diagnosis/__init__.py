"""Diagnosis: problems with the reasons, and the reasons why a task waits."""
