"""Discovery: finds tasks with the change stream and batch queries, and puts them into the preemption queue."""
