"""vLLM's routes for one-shot requests; their errors have OpenAI's form."""
