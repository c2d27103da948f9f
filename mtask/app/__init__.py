"""The interface for users: registers handlers, schedules, middleware and hooks, and gives handlers their context."""
