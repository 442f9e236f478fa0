"""The model worker process: weights, KV tensors, forward and sampling of one device. The only process with torch."""
