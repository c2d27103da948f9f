"""Running: calls handlers, and writes the outcomes of their runs."""
