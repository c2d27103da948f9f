"""Leases: the runs held by this process, the pings that extend them, and the registration of the worker."""
