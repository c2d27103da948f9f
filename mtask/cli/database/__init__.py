"""Commands on the database."""
