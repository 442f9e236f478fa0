"""Ollama's API: chat, generate and embed with lines of JSON, and the facts that its clients ask for first."""
