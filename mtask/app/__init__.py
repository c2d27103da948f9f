"""The interface for users. An App registers handlers, schedules, middleware and hooks. A handler gets a Context."""
