"""Janitors: they do what died processes left undone, and find tasks that no scan for due tasks finds."""
