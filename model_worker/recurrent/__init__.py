"""The state beside the KV cache that recurrent layers keep of each row, and how they compute the rows of a pass."""
