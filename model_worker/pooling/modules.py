"""sentence-transformers' modules behind the transformer: from hidden states to the vector of a text, or of a token.

Knows what the files say (shared/pooling_files.py) and the weights of Dense layers. Knows no forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from model_worker.model import ModelRefused
from model_worker.pooling.reduce import pool
from model_worker.pooling.texts import Texts
from shared.pooling_files import COLBERT, PoolingFiles, pooling_modes
from shared.pooling_modules import PoolingModule, file_of, is_transformer

Step = Callable[[Tensor], Tensor]

# Activations of Dense layers, by the last part of their class's name.
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    name: getattr(nn, name) for name in ("GELU", "Identity", "LeakyReLU", "ReLU", "SiLU", "Sigmoid", "Tanh")
}

# Modules that change nothing about the vectors: dropout is off, and masks of late interaction choose among tokens.
_WITHOUT_EFFECT = ("Dropout", "MultiVectorMask")


@dataclass(frozen=True)
class VectorModules:
    """How hidden states [T, width] become vectors of `width` numbers.

    `before` is done for each token; `modes` join the tokens of a text (none: each token keeps its vector), and `after`
    is done for each text.
    """

    modes: tuple[str, ...]
    before: tuple[Step, ...]
    after: tuple[Step, ...]
    width: int

    def tokens(self, hidden: Tensor) -> Tensor:
        """Return the vector of each token."""
        values = hidden.float()
        for step in self.before:
            values = step(values)
        return values

    def texts(self, hidden: Tensor, texts: Texts) -> Tensor:
        """Return the vector of each text."""
        values = pool(self.tokens(hidden), texts, self.modes)
        for step in self.after:
            values = step(values)
        return values


@dataclass(frozen=True)
class Dense:
    """A linear layer and its activation, in float32."""

    weight: Tensor
    bias: Tensor | None
    activation: nn.Module

    def __call__(self, values: Tensor) -> Tensor:
        found: Tensor = self.activation(nn.functional.linear(values, self.weight, self.bias))
        return found


def vector_modules(
    files: PoolingFiles, hidden_size: int, causal: bool, device: torch.device, by_token: bool
) -> VectorModules:
    """Read the modules of a checkpoint. Without modules.json an encoder's mean counts, and a decoder's last token.

    With `by_token` each token keeps its vector, and a checkpoint without modules.json gives its hidden states. The
    normalization at the end is left out: each request says whether it wants it.
    """
    if not files.modules:
        mode = "lasttoken" if causal else "mean"
        if files.architecture == COLBERT and by_token:
            projection = _colbert_projection(files, hidden_size, device)
            return VectorModules((), (projection,), (), len(projection.weight))
        return VectorModules(() if by_token else (mode,), (), (), hidden_size)
    modes: tuple[str, ...] = ()
    before: list[Step] = []
    after: list[Step] = []
    width = hidden_size
    modules = [module for module in files.modules if not is_transformer(module)]
    while modules and modules[-1].kind in ("Normalize", *_WITHOUT_EFFECT):
        modules.pop()
    for module in modules:
        steps = after if modes else before
        if module.kind == "Pooling":
            if modes:
                raise ModelRefused(files.source, "its modules.json has two Pooling modules, and one is possible")
            modes = pooling_modes(module)
            width *= len(modes)
        elif module.kind == "Dense":
            dense = read_dense(files, module, width, device)
            width = len(dense.weight)
            steps.append(dense)
        elif module.kind == "LayerNorm":
            steps.append(_layer_norm(files, module, width, device))
        elif module.kind == "Normalize":
            steps.append(_normalized)
        elif module.kind not in _WITHOUT_EFFECT:
            raise ModelRefused(
                files.source,
                f"its modules.json has a {module.kind} module; Transformer, Pooling, Dense, LayerNorm, Normalize, "
                "SpladePooling and LogitScore are known",
            )
    if not modes and not by_token:
        raise ModelRefused(files.source, "its modules.json names no Pooling: serve it with task embed_tokens")
    return VectorModules(modes, tuple(before), tuple(after), width)


def read_dense(files: PoolingFiles, module: PoolingModule, width: int, device: torch.device) -> Dense:
    """Read a Dense module whose inputs have `width` numbers."""
    weights = _weights(files, module)
    name = str(module.config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    where = f"{module.path}/config.json"
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelRefused(files.source, f"{where} has activation_function {name!r}; {known} are known")
    if module.config.get("use_residual"):
        raise ModelRefused(files.source, f"{where} has use_residual true, and Dense layers without residual are known")
    weight = weights.get("linear.weight")
    if weight is None or weight.dim() != 2 or weight.shape[1] != width:
        shape = "no linear.weight" if weight is None else f"a linear.weight of {list(weight.shape)}"
        raise ModelRefused(files.source, f"{module.path} has {shape}, and its inputs have {width} numbers")
    bias = weights.get("linear.bias")
    return Dense(
        weight.float().to(device), None if bias is None else bias.float().to(device), _ACTIVATIONS[name]().to(device)
    )


def _colbert_projection(files: PoolingFiles, width: int, device: torch.device) -> Dense:
    """Read the linear layer of Stanford's ColBERT, which lies beside the weights of BERT."""
    weight = _weights(files, PoolingModule("Dense", "", {})).get("linear.weight")
    if weight is None or weight.dim() != 2 or weight.shape[1] != width:
        raise ModelRefused(files.source, f"its model.safetensors has no linear.weight of [*, {width}]: copy it again")
    return Dense(weight.float().to(device), None, nn.Identity())


def _layer_norm(files: PoolingFiles, module: PoolingModule, width: int, device: torch.device) -> Step:
    weights = _weights(files, module)
    if missing := [name for name in ("norm.weight", "norm.bias") if name not in weights]:
        raise ModelRefused(files.source, f"{module.path} has no {missing[0]}: copy its model.safetensors again")
    weight = weights["norm.weight"].float().to(device)
    bias = weights["norm.bias"].float().to(device)
    return lambda values: nn.functional.layer_norm(values, (width,), weight, bias)


def _normalized(values: Tensor) -> Tensor:
    return normalize(values, dim=-1)


def _weights(files: PoolingFiles, module: PoolingModule) -> dict[str, Tensor]:
    path: Path | None = file_of(files.source, f"{module.path}/model.safetensors".lstrip("/"))
    if path is None:
        raise ModelRefused(
            files.source,
            f"{module.path or 'it'} has no model.safetensors: save the model with a newer sentence-transformers",
        )
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelRefused(files.source, f"{path} cannot be read: {error}") from error
