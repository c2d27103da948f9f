"""Flows: tasks that are published together and wait for each other, and the children that handlers add."""
