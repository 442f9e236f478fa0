"""An adapter of all linear modules and the embedding that changes nothing, to learn what adapters cost.

Knows modules by their sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from model_worker.adapters.fitting import AdaptedEmbedding, AdaptedLinear, Adapter, is_of_expert, linear_shape


def blank_adapter(model: PreTrainedModel, rank: int, device: torch.device, dtype: torch.dtype) -> Adapter:
    """Return an adapter of zeros, which modules of equal sizes share. B lies by its ranks.

    The embedding has rank 1, since it takes memory for each token of the vocabulary.
    """
    zeros: dict[int, Tensor] = {}

    def of_width(width: int) -> Tensor:
        if width not in zeros:
            zeros[width] = torch.zeros(rank, width, device=device, dtype=dtype)
        return zeros[width]

    linears: dict[nn.Module, AdaptedLinear] = {}
    for path, module in model.named_modules():
        shape = linear_shape(module)
        if shape is not None and not is_of_expert(path):
            linears[module] = AdaptedLinear(of_width(shape[0]), of_width(shape[1]).T, 1.0, None, None)
    embedding = None
    table = model.get_input_embeddings()
    if isinstance(table, nn.Embedding):
        a, b = (
            torch.zeros(size, 1, device=device, dtype=dtype) for size in (table.num_embeddings, table.embedding_dim)
        )
        embedding = AdaptedEmbedding(a, b, 1.0)
    return Adapter("blank", rank, linears, embedding)
