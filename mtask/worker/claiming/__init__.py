"""Claiming: claims due tasks, as many as there are free slots."""
