"""Text and tokens: tokenizing, detokenizing, and stops."""
