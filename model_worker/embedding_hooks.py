"""Forward hooks: vectors that replace the embeddings of tokens, and hidden states that are collected.

Both hook the two modules that every decoder of transformers has, its input and its output embedding, so they work for
all of them, and cost nothing while they are not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from model_worker.batch import ForwardBatch


@contextmanager
def given_embeddings(embedding: nn.Module, batch: ForwardBatch) -> Iterator[None]:
    """Make `embedding` give the batch's own vectors, within this context, where the batch has some."""
    if batch.embeddings is None:
        yield
        return
    handle = embedding.register_forward_hook(lambda _module, _arguments, output: with_given(output, batch))
    try:
        yield
    finally:
        handle.remove()


def with_given(embeddings: Tensor, batch: ForwardBatch) -> Tensor:
    """Return a copy of tokens' embeddings [.., T, hidden] with the batch's own vectors where it has some."""
    changed = embeddings.clone()
    if batch.embeddings is not None:
        places, vectors = batch.embeddings
        width = changed.shape[-1]
        changed.view(-1, width)[places] = vectors[:, :width].to(changed.dtype)
    return changed


def added_behind_layers(batch: ForwardBatch, levels: int) -> dict[str, Any]:
    """Arguments of a decoder that adds vectors to the outputs of its first layers (DeepStack)."""
    assert batch.embeddings is not None
    places, vectors = batch.embeddings
    order = torch.argsort(places)
    mask = torch.zeros(1, batch.num_tokens, dtype=torch.bool, device=places.device)
    mask[0, places] = True
    parts = vectors[order].chunk(levels + 1, dim=1)
    return {"visual_pos_masks": mask, "deepstack_visual_embeds": list(parts[1:])}


@contextmanager
def taken_inputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of each call of `module`, within this context, in the list."""
    taken: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _module, arguments: taken.append(arguments[0]))
    try:
        yield taken
    finally:
        handle.remove()
