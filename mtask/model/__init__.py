"""The model: documents, status, rules and backoff. No module here uses a driver, an event loop or a clock."""
