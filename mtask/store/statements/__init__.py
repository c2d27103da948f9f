"""Statements: the expressions, filters and update pipelines that operations send."""
