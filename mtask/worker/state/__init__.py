"""State: the data that the parts of a worker share. It imports no other part of the worker."""
