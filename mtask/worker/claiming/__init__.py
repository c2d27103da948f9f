"""Claiming: claims due tasks for the free slots of this worker."""
