"""The views of the page, by subject. Each one only reads, changes through the client, and renders."""
