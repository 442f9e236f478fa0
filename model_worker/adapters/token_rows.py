"""Fits the vectors that an adapter brings for some tokens (PEFT's `trainable_token_indices`).

They take the place of the tokens' vectors in the embedding, and of their rows in the output embedding where that is
named, too, or has the embedding's weight. Knows tensors. Does not know how they are run.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from model_worker.adapters.config import AdapterConfig
from model_worker.adapters.refusal import AdapterRefused


def token_changes(path: str, weight: Tensor, rows: Tensor, config: AdapterConfig) -> tuple[Tensor, Tensor]:
    """Return what the adapter adds to the `weight` [vocabulary, hidden], as two factors: A [vocabulary, rank] and
    B [rank, hidden], in float32.

    `rows` are the vectors in the file. AdapterRefused if they fit neither the weight nor the config.
    """
    tokens = config.tokens_of(path)
    if tuple(rows.shape) != (len(tokens), weight.shape[1]):
        raise AdapterRefused(
            f"{path} brings vectors of the shape {list(rows.shape)}, and trainable_token_indices name {len(tokens)} "
            f"tokens of a model with vectors of {weight.shape[1]} numbers: save the adapter again"
        )
    _check_tokens(path, tokens, len(weight))
    exact = rows.float()
    if not torch.isfinite(exact).all():
        raise AdapterRefused(f"{path} brings vectors with numbers that are not finite: train the adapter again")
    index = torch.tensor(tokens)
    change = exact - weight[index].float()
    if len(tokens) > weight.shape[1]:
        whole = torch.zeros(weight.shape)
        whole[index] = change
        return whole, torch.eye(weight.shape[1])
    chosen = torch.zeros(len(weight), len(tokens))
    chosen[index, torch.arange(len(tokens))] = 1.0
    return chosen, change


def _check_tokens(path: str, tokens: Sequence[int], vocabulary: int) -> None:
    if len(set(tokens)) != len(tokens):
        raise AdapterRefused(f"trainable_token_indices name a token of {path} twice: save the adapter again")
    if tokens and max(tokens) >= vocabulary:
        raise AdapterRefused(
            f"trainable_token_indices name the token {max(tokens)} of {path}, and the model has {vocabulary}: extend "
            "the model with the adapter's tokens, and save it"
        )


def head_is_tied(model: PreTrainedModel) -> bool:
    """Whether the output embedding has the weight of the embedding of tokens."""
    config = model.config.get_text_config()
    return bool(getattr(config, "tie_word_embeddings", False)) and model.get_output_embeddings() is not None
