"""The requests of operators: controls, schedules and purges."""
