"""The doctor: looks for problems, and explains why tasks wait and when they will start."""
