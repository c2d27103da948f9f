"""The worker: finds, claims and runs tasks with the handlers of an app."""
