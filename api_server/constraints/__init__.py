"""The form an answer must have: turns a client's constraint into a grammar for workers, or a reason why not."""
