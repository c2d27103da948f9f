"""Publishing that gathers: with debounce, as a list, once more after a live run, or once a window."""
