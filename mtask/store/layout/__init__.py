"""The layout of the database: validators, indexes, roles, and their setup."""
