"""Safe rollouts: workers of an old and a new version of the code run beside each other, and no task fails of it."""
