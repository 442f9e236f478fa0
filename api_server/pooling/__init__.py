"""One-shot requests: texts to tokens, tokens to values, values to JSON; common to all dialects."""
