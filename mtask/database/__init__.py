"""The layout of the database: validators, setup and roles."""
