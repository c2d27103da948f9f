"""The assembly of features: the only place that lists them, one module for each side."""
