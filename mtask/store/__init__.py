"""The store: all that touches MongoDB. Nothing outside builds a filter, an update or a pipeline."""
