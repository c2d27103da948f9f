"""From the decision to claim to the written end: claims, leases, slots, handlers, outcomes."""
