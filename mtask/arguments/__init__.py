"""What callers publish and find: declared once, and checked before anything is sent."""
