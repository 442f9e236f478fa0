"""Files and batches: many requests in one file, which are run when nothing else is."""
