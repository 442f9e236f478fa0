"""The HTTP dialects: each a thin pair of parse and render around the common path (`api_server/generation.py`)."""
