"""The native HTTP dialect of SGLang."""
