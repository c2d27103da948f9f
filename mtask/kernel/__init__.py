"""The kernel: a task from its publish to its end, by any number of workers."""
