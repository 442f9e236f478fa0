"""SGLang's batch forms: one body, given once for all or as lists, as one `Item` per prompt.

Raises `ValueError` with the sentence for the client.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_server.chat.media_parts import LoadedImage, LoadedSound, LoadedVideo
from api_server.dialects.sglang.schema import GenerateRequest, SamplingParameters

NO_INPUT = "Either text, input_ids or input_embeds should be provided."

# Fields of the body, with the value of null, in the order of `Item`'s fields.
SPREAD: tuple[tuple[str, Any], ...] = (
    ("sampling_params", SamplingParameters()),
    ("return_logprob", False),
    ("logprob_start_len", -1),
    ("top_logprobs_num", 0),
    ("cache_salt", ""),
    ("extra_key", ""),
    ("return_hidden_states", False),
    ("custom_logit_processor", ""),
    ("lora_path", None),
)


@dataclass(frozen=True)
class Item:
    """One prompt of the body with the values that hold for it."""

    rid: str
    # A text, token ids, or vectors that stand for the embeddings of tokens.
    prompt: str | list[int] | NDArray[np.float32]
    sampling: SamplingParameters
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    cache_salt: str
    extra_key: str
    return_hidden_states: bool
    custom_logit_processor: str
    lora_path: str | None
    token_ids_logprob: list[int]
    # The media as the client gave them, each with its path in the body.
    image_data: list[tuple[str, Any]] = field(default_factory=list)
    video_data: list[tuple[str, Any]] = field(default_factory=list)
    audio_data: list[tuple[str, Any]] = field(default_factory=list)
    images: list[LoadedImage] = field(default_factory=list)
    videos: list[LoadedVideo] = field(default_factory=list)
    sounds: list[LoadedSound] = field(default_factory=list)
    # The scheduler's number of the turn of a session that it continues, or 0.
    session_turn: int = 0

    @property
    def n(self) -> int:
        return 1 if self.sampling.n is None else self.sampling.n


@dataclass(frozen=True)
class Batch:
    """The items of a body. `listed`: the answer is a list, also for a list of one prompt."""

    items: list[Item]
    listed: bool


def expand(body: GenerateRequest, fresh_rid: str) -> Batch:
    """One item per prompt."""
    prompts, is_batch = _prompts(body)
    size = len(prompts)
    columns = [_spread(name, getattr(body, name), default, size, is_batch) for name, default in SPREAD]
    rids = _rids(body, fresh_rid, size, is_batch)
    columns.append(_named_tokens(body.token_ids_logprob or [], size))
    columns.append(_media("image_data", body.image_data, size, is_batch))
    columns.append(_media("video_data", body.video_data, size, is_batch))
    columns.append(_media("audio_data", body.audio_data, size, is_batch))
    items = [Item(*values) for values in zip(rids, prompts, *columns, strict=True)]
    counts = {item.n for item in items}
    if len(counts) > 1:
        raise ValueError("The parallel_sample_num should be the same for all samples in sample params.")
    if counts != {1} and isinstance(body.return_logprob, list):
        raise ValueError("Cannot use list return_logprob with parallel_sample_num > 1")
    return Batch(items, listed=is_batch or counts != {1})


def _prompts(body: GenerateRequest) -> tuple[Sequence[Any], bool]:
    given = [name for name in ("text", "input_ids", "input_embeds") if getattr(body, name) is not None]
    if len(given) != 1:
        raise ValueError(NO_INPUT + (" Give exactly one of them." if given else ""))
    if body.input_embeds is not None:
        return _embeddings(body.input_embeds)
    found: Any = body.text if body.input_ids is None else body.input_ids
    if found == [] or (body.input_ids is not None and [] in found):
        raise ValueError(f"{given[0]} cannot be empty.")
    is_batch = isinstance(found, list) and not isinstance(found[0], int)
    return (found if is_batch else [found]), is_batch


def _embeddings(given: list[Any]) -> tuple[Sequence[Any], bool]:
    if not given or not all(given):
        raise ValueError("input_embeds cannot be empty.")
    is_batch = isinstance(given[0][0], list)
    return [_matrix(each) for each in (given if is_batch else [given])], is_batch


def _matrix(rows: list[list[float]]) -> NDArray[np.float32]:
    if len({len(row) for row in rows}) != 1 or not rows[0]:
        raise ValueError("input_embeds must have vectors of one length.")
    with np.errstate(over="ignore"):
        matrix = np.array(rows, np.float32)
    if not np.isfinite(matrix).all():
        raise ValueError("input_embeds must have numbers that float32 can hold.")
    return matrix


def _spread(name: str, value: Any, default: Any, size: int, is_batch: bool) -> list[Any]:
    if not isinstance(value, list):
        return [default if value is None else value] * size
    if not is_batch and len(value) != 1:
        raise ValueError(f"{name} is a list of {len(value)}, but the request has one prompt.")
    if len(value) != size:
        raise ValueError(f"The length of {name} should be equal to the batch size.")
    return [default if v is None else v for v in value]


def _named_tokens(given: Sequence[int | list[int] | None], size: int) -> list[list[int]]:
    """Token ids once for all prompts, or a list of them for each."""
    ids = [token for token in given if isinstance(token, int)]
    if len(ids) == len(given):
        return [ids] * size
    if len(given) != size:
        raise ValueError("The length of token_ids_logprob should be equal to the batch size.")
    return [each if isinstance(each, list) else [] for each in given]


def _media(name: str, given: Any, size: int, is_batch: bool) -> list[list[tuple[str, Any]]]:
    """The media of each prompt, with their paths: one for all prompts, one for each, or a list for each."""
    if given is None or given == []:
        return [[] for _ in range(size)]
    if not isinstance(given, list):
        return [[(name, given)] for _ in range(size)]
    if not is_batch and not any(isinstance(each, list) for each in given):
        return [[(f"{name}[{i}]", item) for i, item in enumerate(given) if item is not None]]
    if len(given) != size:
        raise ValueError(f"The length of {name} should be equal to the batch size.")
    return [_of_one_prompt(each, f"{name}[{i}]") for i, each in enumerate(given)]


def _of_one_prompt(given: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(given, list):
        return [(f"{path}[{i}]", item) for i, item in enumerate(given) if item is not None]
    return [] if given is None else [(path, given)]


def _rids(body: GenerateRequest, fresh_rid: str, size: int, is_batch: bool) -> list[str]:
    if body.rid is None:
        return [fresh_rid] if not is_batch else [uuid.uuid4().hex for _ in range(size)]
    if isinstance(body.rid, str):
        return [body.rid] if not is_batch else [f"{body.rid}_{i}" for i in range(size)]
    rids: list[str] = _spread("rid", body.rid, "", size, is_batch)
    doubles = [rid for rid, count in Counter(rids).items() if count > 1]
    if doubles:
        raise ValueError(f"Duplicate request IDs detected within the request: {doubles[:10]}")
    return rids
