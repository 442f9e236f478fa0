"""From a GGUF file to the model that it describes."""
