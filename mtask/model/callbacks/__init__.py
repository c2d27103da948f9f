"""Callbacks: whom the end of a task is told to, which addresses may be called, and how a message is signed."""
