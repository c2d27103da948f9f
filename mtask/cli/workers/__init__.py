"""Commands on workers."""
