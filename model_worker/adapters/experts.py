"""Adapters of the experts of a mixture, whose weights transformers keeps as one tensor for each projection.

PEFT names them in two ways: as adapted parameters of the module of all experts, and, from earlier releases of
transformers, as linear modules of each expert. Knows the contract of transformers' expert modules: `gate_up_proj` or
`up_proj`, and `down_proj`. Does not know files or rows.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model_worker.adapters import tensors as names
from model_worker.adapters.config import AdapterConfig
from model_worker.adapters.refusal import MERGE, AdapterRefused
from model_worker.adapters.tensors import ModuleTensors

# The end of a wrapper inside of another: PEFT wraps a module once for each adapted parameter.
_INNER = ".base_layer"
# A linear module of one expert.
_OF_EXPERT = re.compile(r"(?P<module>.*experts)\.(?P<number>\d{1,5})\.(?P<linear>\w+)", re.ASCII)
# The arguments of the module's forward.
ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
# What the linear modules of an expert are, by their names.
_GATES = ("w1", "gate_proj")
_UPS = ("w3", "up_proj")
_DOWNS = ("w2", "down_proj")


@dataclass(frozen=True, slots=True, eq=False)
class LowRankExperts:
    """What an adapter adds to one projection of each expert: (x A')B'."""

    a: Tensor  # float32 [experts, rank, inputs]
    b: Tensor  # float32 [experts, outputs, rank], with its scale

    def placed(self, device: torch.device, dtype: torch.dtype) -> LowRankExperts:
        """Return the same on a device, with matrices of this type."""
        return LowRankExperts(self.a.to(device, dtype), self.b.to(device, dtype))

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedExperts:
    """What an adapter adds to the experts of a layer: to what goes in (gate and up together), and what comes out."""

    up: LowRankExperts | None
    down: LowRankExperts | None

    def placed(self, device: torch.device, dtype: torch.dtype) -> AdaptedExperts:
        """Return the same on a device, with matrices of this type."""
        up = None if self.up is None else self.up.placed(device, dtype)
        return AdaptedExperts(up, None if self.down is None else self.down.placed(device, dtype))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.up, self.down) if part is not None)


def is_experts(module: nn.Module | None) -> bool:
    """Return whether a module is the experts of a layer as transformers has them."""
    if not all(hasattr(module, name) for name in ("has_gate", "is_transposed", "down_proj", "num_experts")):
        return False
    known: Any = module
    weight = known.down_proj
    # Of its class: what stands in its place on a GPU has other names. gpt-oss's experts have others, too.
    taken = tuple(inspect.signature(type(known).forward).parameters)[1:]
    plain = isinstance(weight, Tensor) and weight.dim() == 3 and weight.is_floating_point()
    # Linear layers in the place of that tensor have its shape.
    in_codes = isinstance(weight, nn.Module) and len(getattr(weight, "shape", ())) == 3
    return taken == ARGUMENTS and (plain or in_codes)


def experts_path(path: str) -> str | None:
    """Return the path of the module of experts to which an adapter's path may belong, or None."""
    whole = path
    while whole.endswith(_INNER):
        whole = whole.removesuffix(_INNER)
    found = _OF_EXPERT.fullmatch(whole)
    if found is not None:
        return found["module"]
    return whole if whole.endswith("experts") else None


def fit_experts(
    path: str, module: Any, parts: Mapping[str, ModuleTensors], most_rank: int, config: AdapterConfig
) -> tuple[AdaptedExperts, int]:
    """Fit the tensors of a layer's experts, by their paths. Returns also the largest rank. AdapterRefused if they do
    not fit."""
    shapes = _shapes(module)
    found: dict[str, LowRankExperts] = {}
    single: dict[str, dict[int, tuple[Tensor, Tensor, str]]] = {}
    ranks = []
    for each, tensors in parts.items():
        a, b = _pair(each, tensors)
        expert = _OF_EXPERT.fullmatch(each)
        if expert is not None:
            number = int(expert["number"])
            if number >= module.num_experts:
                raise AdapterRefused(f"{each} is one of more experts than the model has: it belongs to another model")
            ranks.append(len(a))
            scaled = config.scale(each, len(a)) * b
            single.setdefault(_projection(each, expert["linear"]), {})[number] = (a, scaled, each)
        else:
            rank, name, fitted = _fit_parameter(each, path, module, (a, b), shapes, config)
            ranks.append(rank)
            if name in found:
                raise AdapterRefused(f"{path}.{name} is adapted twice: save the adapter again")
            found[name] = fitted
    if max(ranks) > most_rank:
        raise AdapterRefused(f"{path} has rank {max(ranks)}, and at most {most_rank} is supported: {MERGE}")
    if single and found:
        raise AdapterRefused(f"{path} is adapted as a whole, and one by one: save the adapter again")
    if single:
        found = _joined(path, module, single, shapes)
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    return AdaptedExperts(found.get(up_name), found.get("down_proj")), max(ranks)


def adapted_experts(module: Any, adapter: AdaptedExperts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts of some tokens with an adapter. `x` [T, hidden]; `experts` and `weights` [T, chosen]."""
    result = torch.zeros(len(x), x.shape[-1], dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        if expert >= module.num_experts:
            continue
        tokens, place = torch.where(experts == expert)
        up_name = "gate_up_proj" if module.has_gate else "up_proj"
        inner = _projected(module, up_name, adapter.up, expert, x[tokens])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        outer = _projected(module, "down_proj", adapter.down, expert, inner)
        if getattr(module, "has_post_expert_norm", False):
            outer = module.post_expert_norm(outer)
        result.index_add_(0, tokens, (outer * weights[tokens, place, None]).float())
    return result


def _projected(module: Any, name: str, adapter: LowRankExperts | None, expert: int, x: Tensor) -> Tensor:
    weight: Tensor = getattr(module, name)[expert]
    y = x @ (weight if module.is_transposed else weight.T)
    if getattr(module, "has_bias", False):
        y = y + getattr(module, f"{name}_bias")[expert]
    if adapter is None:
        return y
    added = (x.to(adapter.a.dtype) @ adapter.a[expert].T) @ adapter.b[expert].T
    return (y.float() + added.float()).to(y.dtype)


def _shapes(module: Any) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs of each projection, by its name."""
    found = {}
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        _, first, second = getattr(module, name).shape
        found[name] = (int(first), int(second)) if module.is_transposed else (int(second), int(first))
    return found


def _pair(path: str, tensors: ModuleTensors) -> tuple[Tensor, Tensor]:
    """Return A and B in float32."""
    if set(tensors.parts) != {names.A, names.B}:
        raise AdapterRefused(
            f"{path} has {', '.join(sorted(tensors.parts))}: experts take {names.A} and {names.B} only"
        )
    a, b = (tensors.parts[name].float() for name in (names.A, names.B))
    if a.dim() != 2 or b.dim() != 2 or len(a) != b.shape[1]:
        raise AdapterRefused(f"{path} has {names.A} and {names.B} that do not multiply: save the adapter again")
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise AdapterRefused(f"{path} has numbers that are not finite: train the adapter again")
    return a, b


def _fit_parameter(
    each: str, path: str, module: Any, pair: tuple[Tensor, Tensor], shapes: Mapping[str, tuple[int, int]], config: Any
) -> tuple[int, str, LowRankExperts]:
    """Fit the adapter of one parameter of all experts, which its shape tells. Returns also rank and name."""
    a, b = pair
    count = int(module.num_experts)
    fitting = [name for name, shape in shapes.items() if (a.shape[1], b.shape[0]) == shape]
    if len(fitting) != 1 or len(a) % count:
        raise AdapterRefused(
            f"{each} has shapes {list(a.shape)} and {list(b.shape)}, which fit no parameter of the {count} experts in "
            f"{path}: the adapter belongs to another model"
        )
    rank = len(a) // count
    scale = config.scale(f"{path}.{fitting[0]}", rank)
    of_experts = b.reshape(len(b), rank, count).permute(2, 0, 1) * scale
    return rank, fitting[0], LowRankExperts(a.reshape(count, rank, -1), of_experts.contiguous())


def _projection(path: str, linear: str) -> str:
    for kind, known in (("gate", _GATES), ("up", _UPS), ("down", _DOWNS)):
        if linear in known:
            return kind
    raise AdapterRefused(f"{path} is no linear module of an expert that is known: {MERGE}")


def _joined(
    path: str,
    module: Any,
    single: Mapping[str, Mapping[int, tuple[Tensor, Tensor, str]]],
    shapes: Mapping[str, tuple[int, int]],
) -> dict[str, LowRankExperts]:
    """Join the adapters of single experts. Gate and up lie one behind the other in one projection."""
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    if "gate" in single and not (module.has_gate and getattr(module, "is_concatenated", True)):
        raise AdapterRefused(f"{path} has gates that do not lie before the rest: {MERGE}")
    outputs = shapes[up_name][1]
    width = outputs // 2 if module.has_gate else outputs
    pieces = {"gate": (up_name, 0, width), "up": (up_name, outputs - width, width)}
    pieces["down"] = ("down_proj", 0, shapes["down_proj"][1])
    found = {}
    for name in (up_name, "down_proj"):
        used = [(single[kind], pieces[kind]) for kind in single if pieces[kind][0] == name]
        if used:
            found[name] = _stacked(module, used, shapes[name])
    return found


def _stacked(
    module: Any,
    used: Iterable[tuple[Mapping[int, tuple[Tensor, Tensor, str]], tuple[str, int, int]]],
    shape: tuple[int, int],
) -> LowRankExperts:
    """Stack the matrices of single experts: the ranks of the pieces of a projection lie side by side."""
    inputs, outputs = shape
    count = int(module.num_experts)
    all_a = []
    all_b = []
    for experts, (_, first, width) in used:
        rank = max(len(a) for a, _, _ in experts.values())
        a_of = torch.zeros(count, rank, inputs)
        b_of = torch.zeros(count, outputs, rank)
        for number, (a, b, each) in experts.items():
            if a.shape[1] != inputs or len(b) != width:
                raise AdapterRefused(
                    f"{each} has shapes {list(a.shape)} and {list(b.shape)}, and this model takes {inputs} inputs and "
                    f"{width} outputs: the adapter belongs to another model"
                )
            a_of[number, : len(a)] = a
            b_of[number, first : first + width, : len(a)] = b
        all_a.append(a_of)
        all_b.append(b_of)
    return LowRankExperts(torch.cat(all_a, 1), torch.cat(all_b, 2))
