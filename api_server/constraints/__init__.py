"""The form an answer must have: from what a client said to a grammar that workers enforce, or to a reason why not."""
