"""Models that make sound of texts in one pass, and codecs that make it of speech tokens."""
