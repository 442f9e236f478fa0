"""The head of a loaded model, by its task and what its files say."""

from __future__ import annotations

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
from shared.pooling_files import PoolingFiles


def head_of(loaded: Loaded, hidden_size: int) -> Head:
    """Return the head for the task of a model. Raises ModelRefused for modules that are not known."""
    files = loaded.files
    task = loaded.task
    if task in ("embed", "embed_tokens"):
        by_token = task == "embed_tokens"
        modules = vector_modules(files, hidden_size, loaded.causal, loaded.device, by_token)
        if by_token:
            return VectorHead(modules, frozenset({PoolingTask.EMBED_TOKENS}))
        vectors = VectorHead(modules, frozenset({PoolingTask.EMBED, PoolingTask.EMBED_TOKENS}))
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


def _sparse_head(files: PoolingFiles, head: ModelHead) -> SparseHead:
    config = next((module.config for module in files.of_kind("SpladePooling")), {})
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
