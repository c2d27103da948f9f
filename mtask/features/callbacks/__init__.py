"""Callbacks: the end of a task is told to an address, by a task of its own. README.md tells where to begin."""
