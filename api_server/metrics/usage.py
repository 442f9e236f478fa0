"""What keys have used: the families of /metrics, and the report of GET /usage for operators."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, Metric
from pydantic import BaseModel, Field
from starlette.responses import Response
from starlette.routing import Route

from api_server.accounts.ledger import Use
from api_server.dialects.openai.errors import render_error
from api_server.dialects.openai.schema import ErrorAnswer
from api_server.state import ServerState
from api_server.web.access import operators_only
from api_server.web.endpoint import Call, Document, endpoint

# Most pairs of a key and a model in /metrics: those that have used most. The report has all.
MOST_SHOWN = 1000

_FAMILIES = {
    "requests": "Answers and requests for values of texts",
    "prompt_tokens": "Prompt tokens submitted",
    "cached_prompt_tokens": "Prompt tokens that came from the prefix cache",
    "generation_tokens": "Tokens generated",
}


class KeyUse(BaseModel):
    key: str = Field(description="The name of the key: the operator's, or key- and the beginning of its digest")
    model: str = Field(description="The model, or the adapter")
    requests: int = Field(description="Answers, and requests for vectors or scores")
    prompt_tokens: int
    cached_prompt_tokens: int
    generation_tokens: int


class KeyLimits(BaseModel):
    key: str
    requests_per_minute: int | None
    tokens_per_minute: int | None


class UsageReport(BaseModel):
    """Use by key and model since the server began, by all API processes."""

    timestamp: float
    usage: list[KeyUse]
    limits: list[KeyLimits]


def key_families(uses: Sequence[Use]) -> Iterator[Metric]:
    """Yields the counters of keys and models, for the rows that are shown."""
    for name, documentation in _FAMILIES.items():
        family = CounterMetricFamily(f"tokenyard_key_{name}", documentation, labels=["key", "model"])
        for use in uses:
            family.add_metric([use.key, use.model], getattr(_shown(use), name))
        yield family


def usage_route() -> Route:
    """GET /usage."""
    document = Document(
        "Use by API key and model, and the limits of keys",
        "health",
        answer=UsageReport,
        errors={403: ErrorAnswer},
        description="For the operator: with the admin key, where there is one.",
    )
    return endpoint("/usage", operators_only(show), render_error, ("GET",), document)


async def show(call: Call) -> Response:
    """Answers the report."""
    server = call.server
    server.accounts.write()
    content = await asyncio.to_thread(lambda: report(server).model_dump_json())
    return Response(content, media_type="application/json")


def report(server: ServerState) -> UsageReport:
    """The report of all keys, as it is written down. May run in a thread."""
    limited = [caller for caller in server.keys.callers if caller.requests_per_minute or caller.tokens_per_minute]
    return UsageReport(
        timestamp=time.time(),
        usage=[_shown(use) for use in server.accounts.ledger.rows()],
        limits=[
            KeyLimits(
                key=caller.name,
                requests_per_minute=caller.requests_per_minute or None,
                tokens_per_minute=caller.tokens_per_minute or None,
            )
            for caller in limited
        ],
    )


def _shown(use: Use) -> KeyUse:
    return KeyUse(
        key=use.key,
        model=use.model,
        requests=use.requests,
        prompt_tokens=use.prompt_tokens,
        cached_prompt_tokens=use.cached_tokens,
        generation_tokens=use.generation_tokens,
    )
