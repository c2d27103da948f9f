"""State: the data that the parts of a worker share. It is passive and imports no other part of the worker."""
