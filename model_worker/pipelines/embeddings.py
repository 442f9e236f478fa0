"""Embeddings within one process: a pipeline over transformers' own modules, and one vector for each context.

How the hidden states of a text become its vector is read from the checkpoint (the files of sentence-transformers), or
said by the caller. It knows token ids, not text, and keeps nothing between calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING
from transformers.utils.hub import cached_file

from interfaces import EmbeddingsContext, EmbeddingsGenerationInputs, EmbeddingsOutput, Pipeline, RequestID
from model_worker.loading.checkpoint import read_config, weights_dtype
from model_worker.model import ModelRefused, first_line

PoolingMode = Literal["mean", "last", "cls"]

_MODES: dict[str, PoolingMode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}


@dataclass(frozen=True)
class Pooling:
    """The vector of a text: the `mean` of its tokens' last hidden states, or that of its `last` or first (`cls`) token;
    `normalize` makes its length 1."""

    mode: PoolingMode
    normalize: bool

    def __call__(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`hidden` [texts, tokens, width] and `mask` [texts, tokens], where 1 is a token and 0 is behind the text."""
        hidden = hidden.float()
        if self.mode == "mean":
            weights = mask[:, :, None].float()
            pooled = (hidden * weights).sum(1) / weights.sum(1)
        else:
            index = mask.sum(1) - 1 if self.mode == "last" else torch.zeros(len(mask), dtype=torch.int64)
            pooled = hidden[torch.arange(len(mask)), index.to(hidden.device)]
        return nn.functional.normalize(pooled, dim=-1) if self.normalize else pooled


class EmbeddingsPipeline(Pipeline[EmbeddingsGenerationInputs, EmbeddingsOutput]):
    """Not to be used from two threads at once. `PipelineEmbeddingsGenerator` gives its `EmbeddingsGenerator` face."""

    def __init__(self, model: PreTrainedModel, pooling: Pooling, max_batch_tokens: int = 8192) -> None:
        self.pooling = pooling
        self._model = model
        self._max_batch_tokens = max_batch_tokens
        self._padding = getattr(model.config, "pad_token_id", None) or 0

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        pooling: Pooling | None = None,
        max_batch_tokens: int = 8192,
    ) -> EmbeddingsPipeline:
        """From a Hugging Face directory or hub name. ValueError says why a model cannot be used.

        Without `pooling` the checkpoint's own counts; one that has none is taken by its last token when it is a
        decoder and by the mean when it is an encoder, and its vectors get length 1. `max_batch_tokens`, padding
        included, are what one forward pass takes.
        """
        target = torch.device(device)
        config = read_config(model)
        found = pooling or _pooling_of(model, config)
        loaded = _load(model, config, weights_dtype(dtype, target))
        nn.Module.to(loaded, target)
        return cls(loaded.eval(), found, max_batch_tokens)

    @property
    def max_length(self) -> int | None:
        """Tokens that a text can have; None where the model sets no limit."""
        return getattr(self._model.config, "max_position_embeddings", None)

    def execute(self, inputs: EmbeddingsGenerationInputs) -> dict[RequestID, EmbeddingsOutput]:
        """ValueError names the request whose tokens do not fit the model; nothing is computed then."""
        batch = inputs.batch
        for name, context in batch.items():
            self._check(name, context)
        outputs: dict[RequestID, EmbeddingsOutput] = {}
        for names in self._groups(batch):
            vectors = self._embed([batch[name].tokens.all for name in names])
            outputs |= {name: EmbeddingsOutput(vector) for name, vector in zip(names, vectors, strict=True)}
        return {name: outputs[name] for name in batch}

    def release(self, request_id: RequestID) -> None:
        """Nothing is kept."""

    def _check(self, name: RequestID, context: EmbeddingsContext) -> None:
        tokens, vocab_size = context.tokens.all, self._model.config.vocab_size
        if self.max_length is not None and len(tokens) > self.max_length:
            raise ValueError(f"request {name!s} has {len(tokens)} tokens; this model takes {self.max_length}")
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(f"request {name!s} has token ids outside 0..{vocab_size - 1}")

    def _groups(self, batch: dict[RequestID, EmbeddingsContext]) -> Iterator[list[RequestID]]:
        """Texts of one pass: alike in length, so that little of it is padding."""
        group: list[RequestID] = []
        for name in sorted(batch, key=lambda name: len(batch[name].tokens)):
            if group and (len(group) + 1) * len(batch[name].tokens) > self._max_batch_tokens:
                yield group
                group = []
            group.append(name)
        if group:
            yield group

    @torch.inference_mode()
    def _embed(self, texts: Sequence[np.ndarray[Any, np.dtype[np.int64]]]) -> list[np.ndarray[Any, Any]]:
        ids = np.full((len(texts), max(map(len, texts))), self._padding, np.int64)
        mask = np.zeros_like(ids)
        for i, tokens in enumerate(texts):
            ids[i, : len(tokens)] = tokens
            mask[i, : len(tokens)] = 1
        device = self._model.device
        attention_mask = torch.from_numpy(mask).to(device)
        output = self._model(input_ids=torch.from_numpy(ids).to(device), attention_mask=attention_mask)
        return list(self.pooling(output.last_hidden_state, attention_mask).cpu().numpy())


def _load(source: str | Path, config: PreTrainedConfig, dtype: torch.dtype | str) -> PreTrainedModel:
    architecture: str = (config.architectures or [config.model_type])[0]
    if config.is_encoder_decoder:
        raise ModelRefused(architecture, "it is an encoder-decoder, and only encoders and decoders embed")
    auto: Any = AutoModel
    try:
        model, info = auto.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelRefused(architecture, first_line(error)) from error
    # BERT's pooler reads the hidden states and changes none of them.
    if missing := sorted(key for key in info["missing_keys"] if not key.startswith("pooler.")):
        raise ModelRefused(architecture, f"the checkpoint lacks {len(missing)} of its weights, such as {missing[0]}")
    loaded: PreTrainedModel = model
    return loaded


def _pooling_of(source: str | Path, config: PreTrainedConfig) -> Pooling:
    modules = _json_of(source, "modules.json")
    if modules is None:
        return Pooling("mean" if type(config) in MODEL_FOR_MASKED_LM_MAPPING else "last", normalize=True)
    mode: PoolingMode | None = None
    normalize = False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            mode = _mode_of(source, f"{module['path']}/config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelRefused(str(source), f"its modules.json has a {kind} layer, and only pooling is known here")
    if mode is None:
        raise ModelRefused(str(source), "its modules.json names no pooling: say which with pooling=")
    return Pooling(mode, normalize)


def _mode_of(source: str | Path, file: str) -> PoolingMode:
    config = _json_of(source, file)
    if config is None:
        raise ModelRefused(str(source), f"it has no {file}, which its modules.json names")
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in _MODES:
        raise ModelRefused(
            str(source), f"{file} asks for {' and '.join(chosen) or 'no pooling'}; one of {', '.join(_MODES)} is known"
        )
    return _MODES[chosen[0]]


def _json_of(source: str | Path, file: str) -> Any:
    """What a file of the checkpoint says; None when there is no such file."""
    try:
        path = cached_file(str(source), file, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None
    return None if path is None else json.loads(Path(path).read_text())
