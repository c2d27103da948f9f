"""Rules and values of publishing: the identity of a task, lookup, flows, and calls that gather."""
