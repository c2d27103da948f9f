"""Requests of a caller, checked before anything is sent."""
