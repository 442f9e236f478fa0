"""The HTTP application: every dialect's routes, the health routes, and what holds for all of them.

A dialect is a package `api_server.dialects.<name>` with `routes() -> list[Route]`, each made by
`api_server.endpoint.endpoint`. It reads the body with `call.json`, maps it to `TextGenerationRequest`, calls
`generation.generate(call.server, ...)` and answers a Starlette response, or `sse.EventStream(frames,
generation.close)`.
"""

from __future__ import annotations
