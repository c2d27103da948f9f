"""Statements: expressions, filters and update pipelines, of which requests are made."""
