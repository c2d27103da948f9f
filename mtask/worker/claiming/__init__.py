"""Claiming: takes what is due, as much as there are free slots for."""
