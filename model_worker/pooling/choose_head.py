"""The head of a loaded model, by its task and what its files say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from interfaces import PoolingTask
from model_worker.model import ModelRefused
from model_worker.pooling.heads import (
    Head,
    LabelHead,
    ModelHead,
    ScoreHead,
    SparseHead,
    TokenLabelHead,
    VectorHead,
    VectorLabelHead,
)
from model_worker.pooling.loaded import Loaded
from model_worker.pooling.modules import vector_modules
from model_worker.pooling.several_heads import with_other_heads
from model_worker.pooling.static_head import static_head
from shared.pooling_files import PoolingFiles


def head_of(loaded: Loaded, hidden_size: int) -> Head:
    """Return the head for the task of a model. Raises ModelRefused for modules that are not known."""
    files = loaded.files
    task = loaded.task
    if task in ("embed", "embed_tokens"):
        by_token = task == "embed_tokens"
        modules = vector_modules(files, hidden_size, loaded.causal, loaded.device, by_token)
        routes = {
            kind: vector_modules(replace(files, modules=some), hidden_size, loaded.causal, loaded.device, by_token)
            for kind, some in files.routes.items()
        }
        if widths := {kind: each.width for kind, each in routes.items() if each.width != modules.width}:
            kind, width = next(iter(widths.items()))
            raise ModelRefused(
                files.source,
                f"vectors of kind {kind!r} have {width} numbers and others {modules.width}: they must agree",
            )
        if by_token:
            return VectorHead(modules, frozenset({PoolingTask.EMBED_TOKENS}), routes)
        vectors = VectorHead(modules, frozenset({PoolingTask.EMBED, PoolingTask.EMBED_TOKENS}), routes)
        return with_other_heads(vectors, files, loaded.vocab_size, loaded.device)
    if files.score_modules:
        modules = vector_modules(files, hidden_size, loaded.causal, loaded.device, by_token=False)
        return VectorLabelHead(modules, files.multi_label)
    head = ModelHead(loaded.model)
    if task == "sparse":
        return _sparse_head(files, head)
    if task == "classify_tokens":
        return TokenLabelHead(head)
    if files.of_kind("LogitScore") or not type(loaded.model).__name__.endswith("ForSequenceClassification"):
        return ScoreHead(head, *files.score_tokens)
    config: Any = loaded.model.config.get_text_config()
    if config.pad_token_id is None:
        # transformers looks for the last token that is no padding, and here there is one token.
        config.pad_token_id = -1
    return LabelHead(head, loaded.causal, files.multi_label)


def static_heads(loaded: Loaded) -> Mapping[str, Head]:
    """Return the heads of texts that go through no transformer, by their kind. Raises ModelRefused."""
    files = loaded.files
    static = {kind: modules for kind, modules in files.routes.items() if files.is_static(kind)}
    if loaded.task == "sparse":
        return {kind: static_head(files, modules, loaded.vocab_size) for kind, modules in static.items()}
    if static:
        kind = next(iter(static))
        raise ModelRefused(files.source, f"texts of kind {kind!r} get weights of words: serve it with task sparse")
    return {}


def _sparse_head(files: PoolingFiles, head: ModelHead) -> SparseHead:
    every = (module for modules in (files.modules, *files.routes.values()) for module in modules)
    config = next((module.config for module in every if module.kind == "SpladePooling"), {})
    strategy = config.get("pooling_strategy", "max")
    activation = config.get("activation_function", "relu")
    if strategy not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise ModelRefused(
            files.source,
            f"its SpladePooling has pooling_strategy {strategy!r} and activation_function {activation!r}; max or sum, "
            "and relu or log1p_relu are known",
        )
    return SparseHead(head, strategy == "max", activation == "log1p_relu")


def labels_of(loaded: Loaded) -> list[str]:
    """Return the names of what the head gives for a text or token, if they have names."""
    if loaded.task in ("rerank", "classify", "classify_tokens"):
        labels = loaded.files.labels
        return labels[:1] if loaded.task == "rerank" else labels
    return []
