"""The Open Inference Protocol v2 of KServe and Triton: health, metadata, infer, and the generate extension."""
