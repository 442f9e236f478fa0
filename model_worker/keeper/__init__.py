"""The keeper of a GPU's weights: a process that owns their memory, so that the worker after a killed one maps them.

The keeper itself (protocol, pieces, cuda_pieces, server) imports no torch; kept_weights is the worker's end.
"""
