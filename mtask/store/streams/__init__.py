"""Change streams: what wakes a worker, and the events that clients follow."""
