"""Checkpoints whose weights are quantized: each format's tensors as encoded weights under the names of plain ones."""
