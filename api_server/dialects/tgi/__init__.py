"""The HTTP dialect of Hugging Face's text-generation-inference."""
