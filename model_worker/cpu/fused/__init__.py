"""A whole decoder stack in one compiled call."""
