"""The parts that only CUDA devices have."""
