"""Reading: tasks, workers and statistics as clients return them, and events as they occur."""
