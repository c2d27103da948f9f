"""Running: calls handlers, and writes how their runs end."""
