"""A worker's weights: other versions of them, memory that is given back, and groups of trainers."""
