"""Leases: pings that extend the leases of held runs, and the registration and heartbeat of the worker."""
