"""Cohere's and Jina's form of reranking, which vLLM, LiteLLM and others speak, too."""
