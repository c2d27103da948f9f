"""What is stored: documents, status, options, names and keys, and the rules. Pure: no driver, no clock."""
