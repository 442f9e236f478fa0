"""Anthropic's dialect: /v1/messages and /v1/messages/count_tokens, for text."""

from api_server.dialects.anthropic.routes import routes

__all__ = ["routes"]
