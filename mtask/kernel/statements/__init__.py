"""Statements: expressions, the rules as server expressions, filters, and the pipeline of each transition."""
