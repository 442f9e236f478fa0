"""Loads the smaller model that guesses for another one, or refuses it with the reason."""

from __future__ import annotations

from collections.abc import Callable

import torch

from model_worker.loading.load import load_model
from model_worker.model import LoadedModel, Progress
from shared.tokenizer_files import load_tokenizer


def load_draft(
    source: str,
    model: str,
    loaded: LoadedModel,
    progress: Progress,
    has_kernels: Callable[[torch.dtype, str], bool] = lambda *_: True,
) -> LoadedModel:
    """Load the model of a directory or hub name that guesses for `model`, which is `loaded`. ValueError says why not.

    It computes in the same type, so that both use the same kernels.
    """
    if load_tokenizer(source).get_vocab() != load_tokenizer(model).get_vocab():
        raise ValueError(
            f"draft: the model {source} has other tokens than {model}, so it cannot guess them: name a smaller model "
            "of the same family, or leave it out"
        )
    dtype = str(loaded.dtype).removeprefix("torch.")
    return load_model(source, dtype, str(loaded.device), progress, has_kernels=has_kernels, vision=False)


def share_of(memory: int, loaded: LoadedModel, draft: LoadedModel) -> int:
    """Return the bytes of KV memory that are left for the model where the draft model has as many blocks."""
    own = loaded.attention.layout.bytes_per_token
    return memory * own // (own + draft.attention.layout.bytes_per_token)


def check_length(draft: LoadedModel, max_model_len: int) -> None:
    """ValueError if the draft model cannot read sequences as long as are served."""
    longest = draft.max_position
    if longest is not None and longest < max_model_len:
        raise ValueError(
            f"draft: its model was made for {longest} positions, and sequences of {max_model_len} tokens are served: "
            f"set max_model_len to {longest}, or leave the model out"
        )
