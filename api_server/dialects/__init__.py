"""The HTTP dialects: each a thin pair of parse and render around `api_server/generation/generation.py`."""
