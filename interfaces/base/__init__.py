"""Names that every other room of interfaces uses."""
