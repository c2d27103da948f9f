"""Requests on the collection of tasks."""
