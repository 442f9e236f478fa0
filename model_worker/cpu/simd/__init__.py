"""Functions of vectors, compiled by numba."""
