"""Images: what encodes them, and how the tokens that stand for them are computed."""
