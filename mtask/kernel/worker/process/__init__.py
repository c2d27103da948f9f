"""The process of a worker: its start and stop, its registration, its state, its clock, its counts and its health."""
