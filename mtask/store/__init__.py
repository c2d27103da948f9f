"""The store: all code that talks to MongoDB. No other package builds a filter, an update or a pipeline."""
