"""The ways to compute a batch with a model: transformers' modules, and the fused stack."""
