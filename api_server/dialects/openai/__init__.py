"""OpenAI's dialect: chat, completions, responses and models under /v1, with vLLM's extra parameters."""

from api_server.dialects.openai.routes import routes

__all__ = ["routes"]
