"""Change streams: the wake-ups of workers, and the events that clients follow."""
