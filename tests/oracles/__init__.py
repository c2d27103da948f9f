"""Rules that only the server applies, in Python: tests judge the server by them."""
