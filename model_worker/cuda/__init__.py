"""What only CUDA devices have."""
