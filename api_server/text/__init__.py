"""Text and tokens, both ways, and where a text ends."""
