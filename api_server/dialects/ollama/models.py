"""The facts of the served models that Ollama's clients ask for: tags, show, ps and version."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.routing import Route

from api_server.dialects.ollama import requests
from api_server.dialects.ollama.errors import render_error
from api_server.dialects.ollama.rendering import timestamp
from api_server.dialects.ollama.schema import ErrorAnswer, Processes, ShowBody, Shown, Tags, Version
from api_server.errors import ErrorKind, RequestFailed
from api_server.generation.weights import version_of
from api_server.state import ServerState
from api_server.web.endpoint import Call, Document, endpoint
from api_server.web.json_bodies import json_response
from shared.gguf.config import config_of
from shared.gguf.file import open_gguf, parts_of
from shared.gguf.format import is_gguf
from shared.tokenizer_files import file_of, read_json

# The version of Ollama whose API this is; clients switch features on by it.
API_VERSION = "0.13.0"
# Models are never unloaded: Ollama shows a time far away for those.
_NEVER = "2318-01-01T00:00:00Z"

_QUANTIZED = re.compile(r"(?<![A-Za-z0-9])(I?Q\d\w*|BF16|F16|F32)(?![A-Za-z0-9])", re.IGNORECASE)
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# Names of Ollama's model_info, under the architecture, and of the values of config.json.
_VALUES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True)
class _Files:
    """The facts in a model's files. Empty and 0 where the files do not say."""

    format: str = ""
    family: str = ""
    quantization: str = ""
    size: int = 0
    config: dict[str, Any] = field(default_factory=dict)


def routes() -> list[Route]:
    missing = {404: ErrorAnswer}
    show_page = Document("Facts of a model", "ollama", body=ShowBody, answer=Shown, errors=missing)
    pages = {
        "/api/tags": (tags, Document("The served models", "ollama", answer=Tags)),
        "/api/ps": (running, Document("The loaded models, which are the served ones", "ollama", answer=Processes)),
        "/api/version": (version, Document("The version of the API", "ollama", answer=Version)),
    }
    return [
        *(endpoint(path, handler, render_error, ("GET",), page) for path, (handler, page) in pages.items()),
        endpoint("/api/show", show, render_error, document=show_page, form=requests.FORM),
    ]


async def tags(call: Call) -> Response:
    """GET /api/tags."""
    found = []
    for state in call.server.models:
        files = await _files(state)
        found += [_listed(state, name, files) for name in (state.model_name, *state.adapters)]
    return json_response({"models": found})


async def running(call: Call) -> Response:
    """GET /api/ps."""
    found = []
    for state in call.server.models:
        if state.max_model_len is not None:
            files = await _files(state)
            more = {"size_vram": files.size if _on_gpu(state) else 0, "expires_at": _NEVER}
            listed = _listed(state, state.model_name, files)
            found.append(listed | more | {"context_length": state.max_model_len})
    return json_response({"models": found})


async def version(call: Call) -> Response:
    """GET /api/version."""
    return json_response({"version": API_VERSION})


async def show(call: Call) -> Response:
    """POST /api/show."""
    body = requests.read(call, ShowBody)
    if not (body.model or body.name):
        raise RequestFailed(ErrorKind.INVALID, "model is missing: name one of /api/tags", field="model")
    name = requests.adapter_of(call) or call.server.model_name
    state = call.server
    files = await _files(state)
    listed = _listed(state, name, files)
    return json_response(
        {
            "modelfile": f"FROM {name}\n",
            "parameters": "",
            "template": state.tokenizer.chat_template,
            "license": "",
            "details": listed["details"],
            "model_info": _info(state, files),
            "capabilities": _capabilities(state),
            "modified_at": listed["modified_at"],
        }
    )


def _listed(state: ServerState, name: str, files: _Files) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(state.created),
        "size": files.size,
        "digest": sha256(f"{name}:{version_of(state)}".encode()).hexdigest(),
        "details": {
            "parent_model": "" if name == state.model_name else state.model_name,
            "format": files.format,
            "family": files.family,
            "families": [files.family],
            "parameter_size": "",
            "quantization_level": "INT8" if state.settings.quantization == "int8" else files.quantization,
        },
    }


def _info(state: ServerState, files: _Files) -> dict[str, Any]:
    """The model's numbers, under the architecture's name, by which clients look for them."""
    family = files.family or "unknown"
    found: dict[str, Any] = {"general.architecture": family, "general.basename": state.model_name}
    length = state.longest_text if state.pooled_model is not None else state.max_model_len
    if length is not None:
        found[f"{family}.context_length"] = length
    for name, key in _VALUES.items():
        if isinstance(files.config.get(key), int):
            found[f"{family}.{name}"] = files.config[key]
    return found


def _capabilities(state: ServerState) -> list[str]:
    if state.pooled_model is not None:
        return ["embedding"] if state.task == "embed" else []
    optional = {"vision": state.sees, "thinking": state.formats.reasoning is not None}
    return ["completion", "tools", *(name for name, has in optional.items() if has)]


def _on_gpu(state: ServerState) -> bool:
    status = state.engine.status
    return status is not None and any(worker.device.startswith("cuda") for worker in status.workers)


async def _files(state: ServerState) -> _Files:
    """The facts in the files of a model; read once, in a thread."""
    return await asyncio.to_thread(_read, state.settings.model)


@cache
def _read(model: str) -> _Files:
    """Reads the facts. Files that cannot be read have none: the model is served, so they are not needed."""
    if not model:
        return _Files()
    try:
        return _of_gguf(model) if is_gguf(model) else _of_folder(model)
    except (OSError, ValueError):
        return _Files()


def _of_gguf(model: str) -> _Files:
    file = open_gguf(model)
    quantized = _QUANTIZED.search(Path(model).name)
    size = sum(part.stat().st_size for part in parts_of(model))
    return _Files("gguf", file.architecture, quantized[1].upper() if quantized else "", size, config_of(file))


def _of_folder(model: str) -> _Files:
    config = read_json(model, "config.json")
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    path = file_of(model, "config.json")
    weights = [] if path is None else list(path.parent.glob("*.safetensors"))
    dtype = str(config.get("dtype") or config.get("torch_dtype") or inner.get("dtype") or inner.get("torch_dtype"))
    return _Files(
        "safetensors",
        str(config.get("model_type") or ""),
        _DTYPES.get(dtype, ""),
        sum(each.stat().st_size for each in weights),
        inner | config,
    )
