"""Bulk changes: many tasks are canceled, retried or removed by a plan that was counted before."""
