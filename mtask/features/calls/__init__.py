"""Typed calls: handlers with arguments that type checkers check, and handles of the tasks that they publish."""
