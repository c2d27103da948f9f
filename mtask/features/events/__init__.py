"""Events of tasks, and waiting for tasks by a stream of them."""
