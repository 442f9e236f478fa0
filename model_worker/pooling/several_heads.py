"""The heads of BGE-M3: a vector of a text, the weights of its words and a vector of each token, from one checkpoint.

The first are those of sentence-transformers' modules. The others are linear layers in files of their own, as
FlagEmbedding publishes them. Knows no forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, normalize

from interfaces import PoolingContext, PoolingTask
from model_worker.model import ModelRefused
from model_worker.pooling.heads import Head, Values, VectorHead
from model_worker.pooling.texts import Texts
from shared.pooling_files import PoolingFiles
from shared.pooling_modules import file_of

_SPARSE = "sparse_linear"
_TOKENS = "colbert_linear"
# Tokens around texts: their words have no weight.
_UNWEIGHTED = ("cls_token", "bos_token", "eos_token", "sep_token", "pad_token", "unk_token")
# Errors of files that are cut off, hold something else, or are of another format.
_READING_ERRORS = (
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    UnpicklingError,
    ValueError,
)


@dataclass(frozen=True)
class _Linear:
    """A linear layer in float32."""

    weight: Tensor
    bias: Tensor

    def __call__(self, values: Tensor) -> Tensor:
        return linear(values.float(), self.weight, self.bias)


@dataclass(frozen=True)
class SeveralHeads:
    """`texts` makes vectors of texts, `words` the weight of each token, and `tokens` its vector."""

    texts: VectorHead
    words: _Linear
    tokens: _Linear
    # bool[vocabulary]: tokens around texts.
    unweighted: Tensor
    tasks: frozenset[PoolingTask] = frozenset({PoolingTask.EMBED, PoolingTask.EMBED_TOKENS, PoolingTask.SPARSE})

    @property
    def width(self) -> int:
        return self.texts.width

    def __call__(self, hidden: Tensor, texts: Texts, options: PoolingContext) -> Values:
        if options.task is PoolingTask.SPARSE:
            return self._weights(hidden, texts)
        if options.task is PoolingTask.EMBED_TOKENS:
            return self._vectors(hidden, texts, options)
        return self.texts(hidden, texts, options)

    def _weights(self, hidden: Tensor, texts: Texts) -> Values:
        """Return each distinct token of a text with its largest weight, if that is above 0."""
        weights = self.words(hidden)[:, 0].relu()
        pieces: list[Tensor] = []
        for ids, own in zip(texts.tokens.split(texts.lengths), weights.split(texts.lengths), strict=True):
            found, places = torch.unique(ids, return_inverse=True)
            largest = torch.zeros(len(found), device=own.device).scatter_reduce(0, places, own, "amax")
            counts = (largest > 0) & ~self.unweighted[found]
            pieces.append(torch.stack([found[counts].float(), largest[counts]], dim=1))
        return Values(torch.cat(pieces), [len(piece) for piece in pieces])

    def _vectors(self, hidden: Tensor, texts: Texts, options: PoolingContext) -> Values:
        """Return the vector of each token but the first of a text, which stands for the text."""
        later = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
        later[texts.bounds[:-1].long()] = False
        values = self.tokens(hidden[later])
        if options.dimensions is not None:
            values = values[:, : options.dimensions]
        rows = [length - 1 for length in texts.lengths]
        return Values(normalize(values, dim=-1) if options.normalize else values, rows)


def with_other_heads(head: VectorHead, files: PoolingFiles, vocab_size: int, device: torch.device) -> Head:
    """Return the heads of a checkpoint that has files of others, too; else `head` itself."""
    if files.config.get("model_type") != "xlm-roberta":
        return head
    paths = [_find(files, name) for name in (_SPARSE, _TOKENS)]
    if paths[0] is None or paths[1] is None:
        return head
    words = _read(files, paths[0], device, outputs=1)
    tokens = _read(files, paths[1], device)
    unweighted = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    unweighted[files.token_ids(*_UNWEIGHTED)] = True
    return SeveralHeads(head, words, tokens, unweighted)


def _find(files: PoolingFiles, name: str) -> Path | None:
    endings = (".safetensors", ".pt")
    found = (file_of(files.source, f"{name}{ending}") for ending in endings)
    return next((path for path in found if path is not None), None)


def _read(files: PoolingFiles, path: Path, device: torch.device, outputs: int | None = None) -> _Linear:
    """Read a layer with so many outputs, or any number. Raises ModelRefused for a file that is broken or of another
    model."""
    try:
        # A pickle is read as tensors only: it can run nothing.
        of_tensors = path.suffix == ".safetensors"
        tensors = load_file(path) if of_tensors else torch.load(path, map_location="cpu", weights_only=True)
        layer = _Linear(tensors["weight"].float().to(device), tensors["bias"].float().to(device))
    except _READING_ERRORS as error:
        raise ModelRefused(files.source, f"{path.name} has no weight and bias: copy it again ({error})") from error
    weight, bias = list(layer.weight.shape), list(layer.bias.shape)
    if len(weight) != 2 or weight[1] != files.config.get("hidden_size") or weight[0] != (outputs or weight[0]):
        raise ModelRefused(files.source, f"{path.stem} has a weight of {weight}, which does not fit its hidden states")
    if bias != weight[:1]:
        raise ModelRefused(files.source, f"{path.stem} has a bias of {bias}, which does not fit its weight of {weight}")
    return layer
