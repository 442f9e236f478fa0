"""Reads GGUF files: metadata, tensors in blocks, configuration and tokenizer. Knows no torch."""
