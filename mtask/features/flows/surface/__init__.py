"""Flows in the command line, in the REST API and on the page."""
