"""The driver of MongoDB: operations and the two stores that run them, connections, encoding, errors, rights."""
