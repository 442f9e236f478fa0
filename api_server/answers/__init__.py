"""One answer: what its text is taken apart into, and who watches it."""
