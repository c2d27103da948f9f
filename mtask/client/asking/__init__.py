"""Checks the requests of a caller before anything is sent to the server."""
