"""What is made of the measurements: figures, tables, pictures and JSON. Nothing here reads a clock or a database."""
