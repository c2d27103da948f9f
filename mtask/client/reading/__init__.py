"""Reading: what clients hand back, and events as they happen."""
