"""The benchmarks: one module for each, with a function `measure`."""
