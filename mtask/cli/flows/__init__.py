"""The commands about flows."""
