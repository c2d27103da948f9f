"""What `celery.utils` has and tasks use."""
