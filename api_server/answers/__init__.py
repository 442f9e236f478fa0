"""One answer: the parts of its text, and its observers."""
