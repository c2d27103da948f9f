"""State: what the parts of a worker share. Passive: it imports no other wing."""
