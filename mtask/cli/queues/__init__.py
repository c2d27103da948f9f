"""Commands on queues."""
