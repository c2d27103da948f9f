"""Leases: extends the leases of held runs by pings, and keeps the worker's registration alive by heartbeats."""
