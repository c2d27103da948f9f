"""What callers publish: checked before anything is sent, and put into the form that the store takes."""
