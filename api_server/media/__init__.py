"""Images of requests: decoded, resized and cut by a helper process, cached, and put where prompts have them."""
