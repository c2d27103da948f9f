"""The model: documents, status, rules and backoff. This package uses no database driver, no event loop and no clock."""
