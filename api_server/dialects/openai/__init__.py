"""OpenAI's dialect: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, with the extra parameters that vLLM knows."""

from api_server.dialects.openai.routes import routes

__all__ = ["routes"]
