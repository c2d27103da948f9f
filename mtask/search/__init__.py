"""Lists and counts of tasks: each examines a bounded number of documents."""
