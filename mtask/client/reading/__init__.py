"""The results of clients: tasks, workers and statistics, and the iterators over events."""
