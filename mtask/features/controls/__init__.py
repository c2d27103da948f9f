"""Controls of queues, task names and tenants: pauses, fair turns, how many finished tasks are kept, and purging."""
