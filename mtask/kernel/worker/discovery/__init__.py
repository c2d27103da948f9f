"""How a worker finds tasks: the change stream, fetches, the inbox, the buffer, and what dead workers left undone."""
