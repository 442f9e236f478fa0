"""OpenAI's dialect: chat, completions, responses and models under /v1, with the extra parameters that vLLM knows."""

from api_server.dialects.openai.routes import routes

__all__ = ["routes"]
