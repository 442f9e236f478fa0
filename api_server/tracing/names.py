"""The names in spans, all of them: OpenTelemetry's conventions for generative AI, vLLM's, and our own.

The conventions are still in development. Names that differ between the version that most tools read and the newest one
are chosen by OTEL_SEMCONV_STABILITY_OPT_IN=gen_ai_latest_experimental.
"""

from __future__ import annotations

from collections.abc import Mapping

SCOPE = "tokenyard"
# Value of the provider's attribute.
PROVIDER = "tokenyard"
# vLLM's span of one answer.
LLM_REQUEST = "llm_request"

OPERATION = "gen_ai.operation.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
CHOICE_COUNT = "gen_ai.request.choice.count"
STOP_SEQUENCES = "gen_ai.request.stop_sequences"
ERROR_TYPE = "error.type"
METHOD = "http.request.method"
PATH = "url.path"
STATUS = "http.response.status_code"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"

# Attributes of requests, by the fields of `SamplingParams`.
SAMPLING: Mapping[str, str] = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_new_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
}

# vLLM's names.
REQUEST_ID = "gen_ai.request.id"
REQUEST_N = "gen_ai.request.n"
PROMPT_TOKENS = "gen_ai.usage.prompt_tokens"
COMPLETION_TOKENS = "gen_ai.usage.completion_tokens"
TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
END_TO_END = "gen_ai.latency.e2e"
TIME_IN_PREFILL = "gen_ai.latency.time_in_model_prefill"
TIME_IN_DECODE = "gen_ai.latency.time_in_model_decode"
TIME_IN_INFERENCE = "gen_ai.latency.time_in_model_inference"

# Our own.
OUTCOME = "tokenyard.outcome"
WORKER = "tokenyard.worker"
DECISION = "tokenyard.decision"
TEXTS = "tokenyard.texts"
AUDIO_SECONDS = "tokenyard.audio_seconds"

# Operations by the end of a path.
_OPERATIONS = {
    "/chat/completions": "chat",
    "/messages": "chat",
    "/responses": "chat",
    "/api/chat": "chat",
    "/completions": "text_completion",
    "/embeddings": "embeddings",
    "/embed": "embeddings",
    "/embed_all": "embeddings",
    "/embed_sparse": "embeddings",
    "/api/embed": "embeddings",
    "/encode": "embeddings",
    "/pooling": "embeddings",
    "/similarity": "embeddings",
    "/rerank": "rerank",
    "/score": "rerank",
    "/classify": "classify",
    "/predict": "classify",
    "/speech": "speech",
    "/images/generations": "image_generation",
    "/images/edits": "image_edit",
    "/images/variations": "image_edit",
    "/transcriptions": "transcription",
    "/translations": "transcription",
}
# Of every other route that generates.
_OTHER_OPERATION = "text_completion"


def provider(latest: bool) -> str:
    """The name of the provider's attribute."""
    return "gen_ai.provider.name" if latest else "gen_ai.system"


def operation(path: str) -> str:
    """The operation of a path."""
    fitting = (ending for ending in _OPERATIONS if path.endswith(ending))
    return _OPERATIONS.get(max(fitting, key=len, default=""), _OTHER_OPERATION)
