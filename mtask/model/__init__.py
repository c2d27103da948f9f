"""The model: documents, status, rules and backoff. Pure: no driver, no event loop, no clock."""
