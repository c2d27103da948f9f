"""Requests: what a caller asks for, checked before anything is sent."""
