"""The registry of handlers: what each handler declares, so that others can publish its tasks by name."""
