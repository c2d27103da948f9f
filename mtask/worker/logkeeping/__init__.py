"""Kept logs: takes the lines of runs, and writes the last ones of each run to the database."""
