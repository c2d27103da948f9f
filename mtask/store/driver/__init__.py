"""The driver: operations, and the loops that run them."""
