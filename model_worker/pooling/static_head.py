"""Weights of words that a checkpoint lists for each token (SparseStaticEmbedding): no model computes them.

Knows its file and the tokens of texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from interfaces import PoolingContext, PoolingTask
from model_worker.model import ModelRefused
from model_worker.pooling.heads import Values
from model_worker.pooling.texts import Texts
from shared.pooling_files import PoolingFiles
from shared.pooling_modules import PoolingModule, file_of


@dataclass(frozen=True)
class StaticHead:
    """`weights` f32[vocabulary] are what each word weighs in a text that has it."""

    weights: Tensor
    tasks: frozenset[PoolingTask] = frozenset({PoolingTask.SPARSE})
    width: int = 0

    def __call__(self, hidden: Tensor, texts: Texts, options: PoolingContext) -> Values:
        """Return pairs of word and weight. The hidden states are not looked at."""
        pieces: list[Tensor] = []
        for tokens in texts.tokens.split(list(texts.lengths)):
            words = tokens.unique()
            weights = self.weights[words]
            pieces.append(torch.stack([words.float(), weights], dim=1)[weights != 0])
        return Values(torch.cat(pieces), [len(piece) for piece in pieces])


def static_head(files: PoolingFiles, modules: Sequence[PoolingModule], vocab_size: int) -> StaticHead:
    """Read the weights of one kind of texts. Raises ModelRefused with the reason."""
    if len(modules) != 1:
        others = ", ".join(module.kind for module in modules[1:])
        raise ModelRefused(files.source, f"{modules[0].kind} is followed by {others}, and it is known by itself only")
    folder = modules[0].path
    path = file_of(files.source, f"{folder}/model.safetensors")
    if path is None:
        raise ModelRefused(
            files.source, f"{folder} has no model.safetensors: save it with sentence-transformers 5 or 6"
        )
    try:
        weights = load_file(path).get("weight")
    except (OSError, SafetensorError) as error:
        raise ModelRefused(files.source, f"{path} cannot be read: {error}") from error
    if weights is None or weights.dim() != 1 or len(weights) > vocab_size:
        found = "no weight" if weights is None else f"weights of shape {list(weights.shape)}"
        raise ModelRefused(files.source, f"{path} has {found}, and the vocabulary has {vocab_size} words")
    if not weights.isfinite().all():
        raise ModelRefused(files.source, f"{path} has weights that are not finite: copy it again")
    padded = torch.zeros(vocab_size)
    padded[: len(weights)] = weights.float()
    return StaticHead(padded)
