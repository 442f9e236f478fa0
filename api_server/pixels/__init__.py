"""Images from descriptions: what a client may ask for, and the files that it gets."""
