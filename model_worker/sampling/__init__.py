"""From logits to a token for each row."""
