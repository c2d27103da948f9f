"""What users write against: handlers and schedules under their names, and the context that a handler gets."""
