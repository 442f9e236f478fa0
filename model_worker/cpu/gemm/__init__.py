"""Matrix products over packed weights."""
