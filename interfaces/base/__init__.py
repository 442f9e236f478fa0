"""Names that every other package of interfaces uses."""
