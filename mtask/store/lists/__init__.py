"""Lists of tasks page by page, and counts, in a collection of any size."""
