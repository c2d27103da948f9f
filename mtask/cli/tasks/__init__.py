"""Commands on tasks."""
