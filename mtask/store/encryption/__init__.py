"""Encryption of values in the client, with MongoDB's explicit client-side field level encryption."""
