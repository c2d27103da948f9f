"""Janitors: they do what dead processes left undone, and find tasks that no scan for due tasks finds."""
