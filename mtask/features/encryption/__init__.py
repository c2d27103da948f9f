"""Encryption: the values of tasks are encrypted before they are sent, and decrypted after they were read."""
