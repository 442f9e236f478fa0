"""The CPU backend: SIMD functions, matrix products, the fused stack."""
