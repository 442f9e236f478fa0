"""Maps a TGI body to one `TextGenerationRequest`. Knows nothing of HTTP or of the answer's shape."""

from __future__ import annotations

import re
from itertools import islice
from typing import TypeVar

from api_server.body import unknown_fields
from api_server.body.validation import Mismatch, parse
from api_server.chat import images
from api_server.chat.media_parts import LoadedImage, arguments
from api_server.constraints.given import of_tgi
from api_server.dialects.tgi.errors import BodyMismatch
from api_server.dialects.tgi.schema import Body, GenerateParameters, GenerateRequest
from api_server.dialects.tgi.validation import Limits, first_problem
from api_server.errors import invalid
from api_server.web.endpoint import Call
from interfaces import LogprobMode, RequestID, SamplingParamsInput, TextGenerationRequest

R = TypeVar("R", bound=Body)

# An image in a prompt, as Markdown writes it. The URL has no "(": with it a search would read to the end of the text
# from each beginning of an image.
_IMAGE = re.compile(r"!\[[^\]\[]{0,1000}\]\(((?:data:|https?://)[^()\s]*)\)", re.IGNORECASE)
# Stands for the model's limits until a worker has reported them; `generate` then refuses the request as not ready.
_UNKNOWN_LIMIT = 1 << 62


def read(model: type[R], call: Call) -> R:
    """Reads the body as a `model`. Raises RequestFailed."""
    unknown_fields.check(call.json, model, {})
    try:
        return parse(model, call.json)
    except Mismatch as mismatch:
        raise BodyMismatch(str(mismatch), mismatch.field) from None


def check(body: GenerateRequest, call: Call, streaming: bool) -> None:
    """Checks the values. Raises RequestFailed for the value that upstream would name first."""
    total = call.server.max_model_len or _UNKNOWN_LIMIT
    limits = Limits(total - 1, total, call.server.settings.max_best_of, call.server.adapters)
    problem = first_problem(body.inputs, body.effective, limits, streaming)
    if problem is not None:
        raise invalid(problem)


async def prompt_and_images(inputs: str, call: Call) -> tuple[str, list[LoadedImage]]:
    """The prompt with a mark for each image that it links to, and these images. Raises RequestFailed.

    A model without eyes reads the links as they are.
    """
    if not call.server.sees or "](" not in inputs:
        return inputs, []
    # One more than is allowed: `load_sources` refuses it.
    found = islice(_IMAGE.finditer(inputs), call.server.settings.limit_images + 1)
    sources = [images.url_source(each[1], "inputs") for each in found]
    loaded = await images.load_sources(call.server, sources, "inputs")
    if not loaded:
        return inputs, []
    mark = (await call.server.media.images.vision()).mark
    return _IMAGE.sub(lambda _: mark, inputs), loaded


async def internal_request(body: GenerateRequest, call: Call, streaming: bool) -> TextGenerationRequest:
    """The internal request. Token details need a second detokenization, so only answers that show them ask for them."""
    parameters = body.effective
    prompt, loaded = await prompt_and_images(body.inputs, call)
    tokens_shown = streaming or parameters.wants_details
    return TextGenerationRequest(
        request_id=RequestID(call.request_id),
        prompt=prompt,
        **arguments(loaded),
        truncate_prompt_to=parameters.truncate,
        constraint=of_tgi(parameters.grammar),
        sampling=_sampling(parameters, tokens_shown),
        n=parameters.best_of or 1,
        lora_name=parameters.adapter_id or None,
        model_defaults=False,
        keep_stop=True,
        token_details=tokens_shown,
        request_path=call.path,
        received=call.received,
    )


def is_sampled(parameters: GenerateParameters) -> bool:
    """True when upstream samples: any value that changes the distribution does it, temperature 1.0 does not."""
    return (
        bool(parameters.do_sample)
        or parameters.temperature not in (None, 1.0)
        or parameters.top_k is not None
        or parameters.top_p not in (None, 1.0)
        or parameters.typical_p is not None
    )


def _sampling(parameters: GenerateParameters, logprobs: bool) -> SamplingParamsInput:
    return SamplingParamsInput(
        temperature=(parameters.temperature or 1.0) if is_sampled(parameters) else 0.0,
        any_temperature=True,
        top_k=parameters.top_k,
        top_p=parameters.top_p,
        typical_p=parameters.typical_p,
        watermark=parameters.watermark,
        frequency_penalty=parameters.frequency_penalty,
        repetition_penalty=parameters.repetition_penalty,
        penalize_prompt=True,
        max_new_tokens=parameters.max_new_tokens,
        stop=parameters.stop_strings,
        seed=parameters.seed,
        logprobs=LogprobMode.WARPED if logprobs or (parameters.best_of or 1) > 1 else LogprobMode.NONE,
        top_logprobs=parameters.top_n_tokens if logprobs else None,
        prompt_logprobs_from=0 if parameters.decoder_input_details else None,
    )
