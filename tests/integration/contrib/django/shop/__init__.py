"""An app of Django that has tasks."""
