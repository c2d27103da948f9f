"""Isolated handlers: they run in executors, which are child processes of a worker."""
