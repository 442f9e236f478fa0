"""Reads the protocol's bodies and maps them to internal requests.

A prompt goes to the model as it is, without the chat template. In `infer` parameters may come as tensors of one
element, as Triton's backends take them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel

from api_server.body import item_limits, unknown_fields, validation
from api_server.dialects.kserve.schema import InferBody, InputTensor, Parameters
from api_server.errors import ErrorKind, RequestFailed, invalid, shown, unsupported
from api_server.web.endpoint import Call
from interfaces import SEED_LIMIT, RequestID, SamplingParamsInput, TextGenerationRequest

B = TypeVar("B", bound=BaseModel)

PROMPT = "text_input"
# Triton's vLLM backend takes all parameters as JSON text in this tensor.
_AS_JSON = "sampling_parameters"
# The one version that a model has here.
VERSION = "1"
DEFAULT_MAX_TOKENS = 16


def read(call: Call, model: type[B]) -> B:
    """Reads and checks the body. Raises RequestFailed."""
    unknown_fields.check(call.json, model, {})
    return _parsed(model, call.json)


def check_model(call: Call) -> str | None:
    """The adapter that the path names. Raises RequestFailed(MODEL_NOT_FOUND) for an unknown model or version."""
    adapter = call.server.check_model(call.path_params["model"])
    version = call.path_params.get("version", VERSION)
    if version != VERSION:
        raise RequestFailed(
            ErrorKind.MODEL_NOT_FOUND, f"the version {version[:100]!r} does not exist; each model has {VERSION}"
        )
    return adapter


def infer_requests(call: Call, given: InferBody) -> list[TextGenerationRequest]:
    """One internal request for each prompt among the tensors."""
    named = {tensor.name: tensor for tensor in given.inputs}
    if len(named) < len(given.inputs):
        raise invalid("inputs: each tensor needs a name of its own", "inputs")
    prompts = _prompts(named)
    item_limits.check_count(len(prompts), "prompts", "inputs", call.server.settings.max_queued)
    own = {} if given.parameters is None else given.parameters.model_dump(exclude_none=True)
    parameters = _parsed(Parameters, own | _of_tensors(named))
    return [request(call, prompt, parameters) for prompt in prompts]


def request(call: Call, prompt: str, parameters: Parameters) -> TextGenerationRequest:
    """A prompt as one internal request."""
    return TextGenerationRequest(
        request_id=RequestID(call.request_id),
        model_name=call.server.model_name,
        lora_name=check_model(call),
        prompt=prompt,
        sampling=_sampling(parameters),
        default_max_new_tokens=DEFAULT_MAX_TOKENS,
        request_path=call.route_path,
        received=call.received,
    )


def _sampling(given: Parameters) -> SamplingParamsInput:
    stop = given.stop if given.stop is not None else given.stop_words
    seed = given.seed if given.seed is not None else given.random_seed
    return SamplingParamsInput(
        max_new_tokens=given.max_tokens if given.max_tokens is not None else given.max_new_tokens,
        min_new_tokens=given.min_tokens,
        temperature=given.temperature,
        any_temperature=True,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        ignore_eos=given.ignore_eos,
        stop=[stop] if isinstance(stop, str) else stop,
        seed=None if seed is None else seed % SEED_LIMIT,
    )


def _prompts(named: Mapping[str, InputTensor]) -> list[str]:
    tensor = named.get(PROMPT)
    if tensor is None:
        raise invalid(f"inputs must have a tensor {PROMPT} (BYTES) with one prompt or more", "inputs")
    if tensor.datatype != "BYTES":
        raise invalid(f"{PROMPT} must be of datatype BYTES, got {shown(tensor.datatype)}", "inputs")
    found = _elements(tensor)
    if not found or not all(isinstance(each, str) for each in found):
        raise invalid(f"{PROMPT}.data must be a list of texts", "inputs")
    return found


def _of_tensors(named: Mapping[str, InputTensor]) -> dict[str, Any]:
    """The parameters among the tensors."""
    found: dict[str, Any] = {}
    for name, tensor in named.items():
        if name == PROMPT:
            continue
        if name != _AS_JSON and name not in Parameters.model_fields:
            known = ", ".join((PROMPT, _AS_JSON, *Parameters.model_fields))
            raise invalid(f"inputs: there is no tensor {name!r:.100}; there are {known}", "inputs")
        values = _elements(tensor)
        if name == _AS_JSON:
            found |= _decoded(values)
        elif name in ("stop", "stop_words"):
            found[name] = values
        elif len(values) != 1:
            raise invalid(f"{name} must have one element, got {len(values)}", "inputs")
        else:
            found[name] = values[0]
    return found


def _decoded(values: list[Any]) -> dict[str, Any]:
    if len(values) == 1 and isinstance(values[0], str):
        try:
            found = orjson.loads(values[0])
        except orjson.JSONDecodeError:
            found = None
        if isinstance(found, dict):
            return found
    raise invalid(f"{_AS_JSON} must have one element: the parameters as a JSON object in a text", "inputs")


def _elements(tensor: InputTensor) -> list[Any]:
    """The elements of a tensor, whose data may be nested as its shape is. Raises RequestFailed."""
    if "binary_data_size" in (tensor.parameters or {}):
        raise unsupported(f"{tensor.name}.parameters.binary_data_size", "binary data: send the elements as JSON")
    wanted = 1
    for size in tensor.shape:
        wanted *= size
    found = tensor.data if isinstance(tensor.data, list) else [tensor.data]
    for _ in tensor.shape[1:]:
        if any(isinstance(each, list) for each in found):
            found = [inner for each in found for inner in (each if isinstance(each, list) else [each])]
    if len(found) != wanted:
        raise invalid(
            f"{tensor.name}: the shape {shown(tensor.shape)} has {wanted} elements, and data has {len(found)}", "inputs"
        )
    return found


def _parsed(model: type[B], value: Any) -> B:
    try:
        return validation.parse(model, value)
    except validation.Mismatch as error:
        raise invalid(str(error), error.field or None) from None
