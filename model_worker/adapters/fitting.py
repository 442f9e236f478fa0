"""Fits an adapter to a model: finds the modules that it adapts, checks shapes, and computes what depends on the base.

Knows linear modules by their shape and weight, whatever their class. Does not know how they are run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from model_worker.adapters import tensors as names
from model_worker.adapters.config import AdapterConfig, parse_config
from model_worker.adapters.experts import AdaptedExperts, experts_path, fit_experts, is_experts
from model_worker.adapters.files import read_files
from model_worker.adapters.refusal import MERGE, AdapterRefused
from model_worker.adapters.tensors import ModuleTensors, by_module
from model_worker.adapters.token_rows import head_is_tied, token_changes

# Largest rank: beyond, an adapter costs as much as a model.
MOST_RANK = 512
# Largest relative error of a weight that was rounded to eight bits.
_ROUNDING = 0.015
# What modules have that give more than a row of outputs for each of inputs: routers also choose experts, and some
# multiply groups of inputs.
_NOT_PLAIN = ("top_k", "n_groups")
# Rows of a weight whose norm is computed at a time, so that little memory is taken.
_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedLinear:
    """What an adapter makes of a linear module: y = gain * (xW' + scale * (xA')B') + c + bias, where c is its bias."""

    a: Tensor  # float32 [rank, inputs]
    b: Tensor  # float32 [outputs, rank]
    scale: float
    gain: Tensor | None  # float32 [outputs]; None: 1
    bias: Tensor | None  # float32 [outputs]; None: 0

    def placed(self, device: torch.device, dtype: torch.dtype) -> AdaptedLinear:
        """Return the same on a device, with matrices of this type."""
        gain = None if self.gain is None else self.gain.to(device)
        bias = None if self.bias is None else self.bias.to(device)
        return AdaptedLinear(self.a.to(device, dtype), self.b.to(device, dtype), self.scale, gain, bias)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.a, self.b, self.gain, self.bias) if tensor is not None)


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedEmbedding:
    """What an adapter adds to an embedding's vector of token t: scale * A[t]B'."""

    a: Tensor  # float32 [vocabulary, rank]
    b: Tensor  # float32 [hidden, rank]
    scale: float

    def placed(self, device: torch.device, dtype: torch.dtype) -> AdaptedEmbedding:
        """Return the same on a device, with matrices of this type."""
        return AdaptedEmbedding(self.a.to(device, dtype), self.b.to(device, dtype), self.scale)

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter that fits a model."""

    digest: str
    rank: int  # the largest
    linears: dict[nn.Module, AdaptedLinear]
    embedding: AdaptedEmbedding | None
    experts: dict[nn.Module, AdaptedExperts] = field(default_factory=dict)

    def placed(self, device: torch.device, dtype: torch.dtype) -> Adapter:
        """Return the same on a device, with matrices of this type."""
        linears = {module: one.placed(device, dtype) for module, one in self.linears.items()}
        experts = {module: one.placed(device, dtype) for module, one in self.experts.items()}
        embedding = None if self.embedding is None else self.embedding.placed(device, dtype)
        return replace(self, linears=linears, embedding=embedding, experts=experts)

    @property
    def nbytes(self) -> int:
        size = sum(one.nbytes for one in self.linears.values()) + sum(one.nbytes for one in self.experts.values())
        return size if self.embedding is None else size + self.embedding.nbytes


def read_adapter(
    folder: Path, model: PreTrainedModel, most_bytes: int, modules: Mapping[str, nn.Module] | None = None
) -> Adapter:
    """Read an adapter's directory for a model, whose modules have other names in files if `modules` says so.

    Raises as `read_files` does, and AdapterRefused if it does not fit.
    """
    files = read_files(folder, most_bytes)
    config = parse_config(files.config)
    modules = dict(model.named_modules()) if modules is None else modules
    linears: dict[nn.Module, AdaptedLinear] = {}
    embedding = None
    tied: tuple[str, Tensor] | None = None
    ranks = [0]
    found = by_module(files.tensors, config)
    experts = _fit_all_experts(found, modules, config, ranks)
    for path, parts in found.items():
        module = _find(path, modules)
        pair = parts.pair(path)
        if pair is not None:
            ranks.append(_rank(path, parts, pair))
        if isinstance(module, nn.Embedding):
            if module is not model.get_input_embeddings():
                raise AdapterRefused(f"{path} is not the embedding of tokens, and no other can be adapted: {MERGE}")
            embedding = _fit_embedding(path, module, parts, pair, config)
            if names.TOKENS in parts.parts and head_is_tied(model):
                tied = path, parts.parts[names.TOKENS]
        elif module in linears:
            raise AdapterRefused(f"{path} is adapted twice: save the adapter again")
        elif names.TOKENS in parts.parts:
            linears[module] = _fit_token_rows(path, module, parts.parts[names.TOKENS], config)
        elif names.WEIGHT in parts.parts:
            linears[module] = _fit_whole_linear(path, module, parts.parts)
        else:
            linears[module] = _fit_linear(path, module, parts, pair, config)
    if tied is not None:
        head: Any = model.get_output_embeddings()
        if head not in linears:
            linears[head] = _fit_token_rows(tied[0], head, tied[1], config)
    if not linears and not experts and embedding is None:
        raise AdapterRefused("it has no tensors: save the adapter again")
    return Adapter(files.digest, max(ranks), linears, embedding, experts)


def _fit_all_experts(
    found: dict[str, ModuleTensors], modules: Mapping[str, nn.Module], config: AdapterConfig, ranks: list[int]
) -> dict[nn.Module, AdaptedExperts]:
    """Take the tensors of experts out of those found, and fit them. Their ranks are added to `ranks`."""
    by_path: dict[str, dict[str, ModuleTensors]] = {}
    for path in list(found):
        whole = experts_path(path)
        if whole is not None and is_experts(_named(whole, modules)):
            by_path.setdefault(whole, {})[path] = found.pop(path)
    experts = {}
    for whole, parts in by_path.items():
        module = _find(whole, modules)
        experts[module], rank = fit_experts(whole, module, parts, MOST_RANK, config)
        ranks.append(rank)
    return experts


def _find(path: str, modules: Mapping[str, nn.Module]) -> nn.Module:
    """Find the module that a path names. A text model's modules lie deeper in a model that also takes images."""
    found = _named(path, modules)
    if found is None or not path:
        raise AdapterRefused(f"the model has no module {path}, which the adapter adapts: it belongs to another model")
    if is_of_expert(path):
        raise AdapterRefused(f"{path} is an expert, whose rows are chosen anew in each pass: {MERGE}")
    return found


def is_of_expert(path: str) -> bool:
    """Whether a path is that of a module of one expert, which is given some of the rows."""
    return ".experts." in f".{path}"


def _named(path: str, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    return modules.get(path) or modules.get(path.replace(".language_model.", ".", 1))


def _rank(path: str, parts: ModuleTensors, pair: tuple[str, str]) -> int:
    """Return the rank of a module's A and B."""
    a, b = (parts.parts[name] for name in pair)
    rank = int(a.shape[0])
    if a.dim() != 2 or b.dim() != 2 or b.shape[1] != rank:
        raise AdapterRefused(
            f"{path} has {pair[0]} of shape {list(a.shape)} and {pair[1]} of shape {list(b.shape)}, which do not "
            "multiply: save the adapter again"
        )
    if rank > MOST_RANK:
        raise AdapterRefused(f"{path} has rank {rank}, and at most {MOST_RANK} is supported: {MERGE}")
    return rank


def _fit_linear(
    path: str, module: nn.Module, parts: ModuleTensors, pair: tuple[str, str] | None, config: AdapterConfig
) -> AdaptedLinear:
    inputs, outputs = _shape_of(path, module)
    found = parts.parts
    if pair is None:
        # Its bias alone is another.
        if not set(found) <= {names.BIAS, names.BASE_BIAS}:
            raise AdapterRefused(f"{path} has {', '.join(sorted(found))} and no {names.A}: save the adapter again")
        a = torch.zeros(1, inputs)
        b = torch.zeros(outputs, 1)
        scale = 1.0
    else:
        if pair[0] != names.A:
            raise AdapterRefused(f"{path} is adapted as an embedding and is a linear module: it is for another model")
        a = _checked(path, names.A, found[names.A], (int(found[names.A].shape[0]), inputs))
        b = _checked(path, names.B, found[names.B], (outputs, len(a)))
        scale = config.scale(path, len(a))
    gain = None
    _check_magnitude(path, found, config.dora and pair is not None)
    if names.MAGNITUDE in found:
        magnitude = _checked(path, names.MAGNITUDE, found[names.MAGNITUDE].flatten(), (outputs,))
        gain = magnitude / _norms(module, a, b, scale)
        _check_gain(path, gain)
    _check_copy(path, module, found)
    return AdaptedLinear(a, b, scale, gain, _bias(path, module, found, scale, outputs))


def _fit_token_rows(path: str, module: nn.Module, rows: Tensor, config: AdapterConfig) -> AdaptedLinear:
    """Fit an output embedding in which the rows of some tokens are others."""
    chosen, change = token_changes(path, _weight(module), rows, config)
    return AdaptedLinear(change, chosen, 1.0, None, None)


def _fit_whole_linear(path: str, module: nn.Module, found: Mapping[str, Tensor]) -> AdaptedLinear:
    """Fit a linear module that the adapter brings whole: B is what its weight adds to the base's, and A is 1."""
    inputs, outputs = _shape_of(path, module)
    weight = _whole(path, found, (inputs, outputs) if isinstance(module, Conv1D) else (outputs, inputs))
    change = (weight.T if isinstance(module, Conv1D) else weight) - _weight(module).float()
    return AdaptedLinear(torch.eye(inputs), change, 1.0, None, _bias(path, module, found, 1.0, outputs))


def _whole(path: str, found: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
    """Return the weight of a module that the adapter brings whole."""
    others = sorted(set(found) - {names.WEIGHT, names.BIAS})
    if others:
        raise AdapterRefused(f"{path} is brought whole, and has {', '.join(others)}, too: save the adapter again")
    return _checked(path, names.WEIGHT, found[names.WEIGHT], shape)


def _fit_embedding(
    path: str, module: nn.Embedding, parts: ModuleTensors, pair: tuple[str, str] | None, config: AdapterConfig
) -> AdaptedEmbedding:
    found = parts.parts
    size = module.num_embeddings, module.embedding_dim
    factor = _embed_scale(module)
    if names.WEIGHT in found:
        change = _whole(path, found, size) - _weight(module).float()
        return AdaptedEmbedding(change, torch.eye(module.embedding_dim), factor)
    if names.TOKENS in found:
        chosen, change = token_changes(path, _weight(module), found[names.TOKENS], config)
        return AdaptedEmbedding(chosen, change.T.contiguous(), factor)
    if pair is None or pair[0] != names.EMBEDDING_A:
        raise AdapterRefused(f"{path} is an embedding, and is adapted as a linear module: it is for another model")
    _check_magnitude(path, found, config.dora)
    a, b = (found[name] for name in pair)
    a = _checked(path, names.EMBEDDING_A, a, (len(a), module.num_embeddings))
    b = _checked(path, names.EMBEDDING_B, b, (module.embedding_dim, len(a)))
    _check_copy(path, module, found)
    scale = config.scale(path, len(a))
    if not config.dora:
        return AdaptedEmbedding(a.T.contiguous(), b, scale * factor)
    # DoRA scales each number of a vector by the length of its column, so the change has no low rank.
    weight = _weight(module).float()
    added = scale * (a.T @ b.T)
    magnitude = _checked(path, names.MAGNITUDE, found[names.MAGNITUDE].flatten(), (module.embedding_dim,))
    gain = magnitude / (weight + added).norm(dim=0)
    _check_gain(path, gain)
    return AdaptedEmbedding(gain * (weight + added) - weight, torch.eye(module.embedding_dim), factor)


def _embed_scale(module: nn.Embedding) -> float:
    """Return what an embedding multiplies its rows by: modules round a tensor to their dtype, and no number."""
    scale = getattr(module, "embed_scale", 1.0)
    if not isinstance(scale, Tensor):
        return float(scale)
    # Those whose table is in codes have a weight only when it is asked for.
    dtype = getattr(module, "dtype", None) or module.weight.dtype
    return float(scale.to(dtype))


def _check_magnitude(path: str, found: Mapping[str, Tensor], wanted: bool) -> None:
    if (names.MAGNITUDE in found) != wanted:
        raise AdapterRefused(f"{path} must have {names.MAGNITUDE} if, and only if, use_dora is true: save it again")


def _check_gain(path: str, gain: Tensor) -> None:
    if not torch.isfinite(gain).all():
        raise AdapterRefused(f"{path} has an output whose weights are all zero, which DoRA cannot scale: {MERGE}")


def _checked(path: str, part: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor in float32, if it has this shape and all its numbers are finite."""
    if tuple(tensor.shape) != shape:
        raise AdapterRefused(
            f"{path}.{part} has the shape {list(tensor.shape)}, and this model takes {list(shape)}: the adapter "
            "belongs to another model"
        )
    exact = tensor.float()
    if not torch.isfinite(exact).all():
        raise AdapterRefused(f"{path}.{part} has numbers that are not finite: train the adapter again")
    return exact


def linear_shape(module: nn.Module) -> tuple[int, int] | None:
    """Return the inputs and outputs of a linear module that gives one tensor, with a row for each of its inputs."""
    known: Any = module
    if isinstance(module, Conv1D):
        return int(known.nx), int(known.nf)
    is_linear = hasattr(module, "in_features") and hasattr(module, "out_features")
    if not is_linear or any(hasattr(module, name) for name in _NOT_PLAIN):
        return None
    return int(known.in_features), int(known.out_features)


def _shape_of(path: str, module: nn.Module) -> tuple[int, int]:
    shape = linear_shape(module)
    if shape is None:
        raise AdapterRefused(
            f"{path} is a {type(module).__name__}, and only linear modules that give their product and nothing else "
            f"can be adapted: {MERGE}"
        )
    return shape


def _weight(module: nn.Module) -> Tensor:
    """Return the weight [outputs, inputs], for inputs as the model has them."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    plain = weight.detach().cpu()
    scales = getattr(module, "input_scales", None)
    if scales is not None:
        # The module multiplies its inputs first.
        plain = plain * scales.cpu()
    return plain.T if isinstance(module, Conv1D) else plain


def _norms(module: nn.Module, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the lengths of the rows of W + scale * BA."""
    weight = _weight(module)
    parts = zip(weight.split(_ROWS_AT_A_TIME), b.split(_ROWS_AT_A_TIME), strict=True)
    return torch.cat([torch.addmm(rows.float(), part, a, alpha=scale).norm(dim=1) for rows, part in parts])


def _bias(path: str, module: nn.Module, found: Mapping[str, Tensor], scale: float, outputs: int) -> Tensor | None:
    """Return what is added to the module's own bias."""
    added = None
    if names.B_BIAS in found:
        added = scale * _checked(path, names.B_BIAS, found[names.B_BIAS], (outputs,))
    for part in {names.BIAS, names.BASE_BIAS} & set(found):
        own = module.bias
        if not isinstance(own, Tensor):
            raise AdapterRefused(f"{path}.{part} is a bias, and the module has none: the adapter is for another model")
        change = _checked(path, part, found[part], (outputs,)) - own.detach().cpu().float()
        added = change if added is None else added + change
    return added


def _check_copy(path: str, module: nn.Module, found: Mapping[str, Tensor]) -> None:
    """Refuse an adapter whose copy of the base's weight is another: it brings tokens, or a weight that was trained."""
    if names.BASE_WEIGHT not in found:
        return
    copy = found[names.BASE_WEIGHT]
    weight = _weight(module)
    # A quantized module has no parameter, and gives its weight rounded.
    most = 0.0 if "weight" in dict(module.named_parameters(recurse=False)) else _ROUNDING
    if copy.shape != weight.shape or (copy.to(weight.dtype).float() - weight.float()).norm() > most * weight.norm():
        raise AdapterRefused(
            f"{path}.{names.BASE_WEIGHT} differs from the model's own weight, in its shape or its numbers: {MERGE}"
        )
