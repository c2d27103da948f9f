"""The command line: `mtask` and `mtask-worker`."""
