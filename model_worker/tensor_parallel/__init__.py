"""A model in parts, one on each of several processes, which together are one worker."""
