"""Operating: controls, schedules and purges."""
