"""LoRA adapters: their files, how they fit a model's modules, and how these compute with them."""
