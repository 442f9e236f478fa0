"""One-shot tasks: models whose answer to a text is one forward pass, without KV cache and sampling."""
