"""Discovery: finds tasks by the change stream and by batch queries, and puts them into the preemption queue."""
