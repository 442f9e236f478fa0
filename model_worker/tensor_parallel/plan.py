"""Reads how a model of transformers is split among ranks: its plan, by names of modules and parameters.

Knows the plans of transformers 5 and the shapes of a model. Does not know ranks' processes, nor where weights are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from model_worker.model import ModelRefused

# What becomes of a module's inputs and outputs: nothing, its own part of the input first, a sum or a gather after it.
_COLWISE = {"colwise", "packed_colwise"}
_GATHERED = {"colwise_gather_output", "colwise_rep"}
_ROWWISE = {"rowwise", "packed_rowwise"}
_SPLITTING = {"rowwise_split_input", "rowwise_rep"}
_SUMMED = {"moe_tp_experts", "ep_dispatch_experts"}
# Tensors that have one expert after the other, of which each rank has some whole ones.
_WHOLE_EXPERTS = {"grouped_gemm"}
# Left whole on each rank. A table of embeddings could be split, for a further sum.
_WHOLE = {"replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise", "local_params"}
_KNOWN = _COLWISE | _GATHERED | _ROWWISE | _SPLITTING | _SUMMED | _WHOLE_EXPERTS | _WHOLE
# What of a plan for experts is not in the plan for all else.
_OF_EXPERTS = {"ep_dispatch_experts"} | _WHOLE_EXPERTS
# Implementations of experts in transformers that leave out tokens whose expert is elsewhere.
_SKIPPING = {"grouped_mm", "batched_mm"}
# Projections whose outputs are the heads of K and V.
_KV_PROJECTIONS = {"k_proj", "v_proj"}
_PACKED_PARTS = 2


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut: along `dim` into `parts` equal ones; each of `packed` sections by itself."""

    dim: int
    parts: int
    packed: int = 1

    def bounds(self, size: int, rank: int, ranks: int) -> list[tuple[int, int]]:
        """Return where a rank's pieces begin and end, in a dimension of this size."""
        part = rank * self.parts // ranks
        section = size // self.packed
        first = part * section // self.parts
        last = (part + 1) * section // self.parts
        return [(place * section + first, place * section + last) for place in range(self.packed)]


@dataclass(frozen=True)
class SplitPlan:
    """What is cut, by names of parameters; and modules that get a part of their input, or whose outputs are joined."""

    ranks: int
    cuts: Mapping[str, Cut]
    takes_part: frozenset[str]
    summed: frozenset[str]
    gathered: frozenset[str]
    # Attention modules whose KV heads are copied, and their query heads for each KV head.
    groups: Mapping[str, int]
    # Modules of experts that lie on one rank each, and their number.
    experts: Mapping[str, int]


def split_plan(model: PreTrainedModel, ranks: int) -> SplitPlan:
    """Read the plan of a model, whose parameters may be without memory. ModelRefused where it cannot be split so.

    Where the architecture has a plan for experts, each lies on one rank, and no rank has a slice of each.
    """
    architecture = type(model).__name__
    rules: dict[str, str] = {**(getattr(model, "_tp_plan", None) or {}), **_expert_rules(model, ranks)}
    if not rules:
        raise ModelRefused(
            architecture,
            f"tensor_parallel {ranks}: transformers has no plan to split it: leave tensor_parallel out",
        )
    reader = _Reader(model, architecture, ranks)
    for pattern, style in rules.items():
        if style not in _KNOWN:
            raise ModelRefused(
                architecture,
                f"its plan splits {pattern} as {style!r}, which is not supported here: leave tensor_parallel out",
            )
        reader.apply(_pattern(pattern), style)
    return reader.plan()


def _expert_rules(model: PreTrainedModel, ranks: int) -> dict[str, str]:
    """Return the rules by which experts lie on one rank each; none where there are too few, or transformers has none.

    The rules are those of `base_model_ep_plan`.
    """
    plan: dict[str, str] = getattr(model, "_ep_plan", None) or {}
    rules = {pattern: style for pattern, style in plan.items() if style in _OF_EXPERTS}
    patterns = [_pattern(pattern) for pattern, style in rules.items() if style in _SUMMED]
    modules = [m for name, m in model.named_modules() if any(pattern.fullmatch(name) for pattern in patterns)]
    return rules if modules and all(_may_lie_apart(module, ranks) for module in modules) else {}


def _may_lie_apart(module: nn.Module, ranks: int) -> bool:
    computes = getattr(getattr(module, "config", None), "_experts_implementation", None)
    knows = hasattr(module, "_is_expert_parallel") and computes in _SKIPPING
    return knows and int(getattr(module, "num_experts", 0)) >= ranks


def _pattern(rule: str) -> re.Pattern[str]:
    return re.compile(re.escape(rule).replace(r"\*", r"\d+"))


class _Reader:
    """Applies the rules of a plan, one after the other."""

    def __init__(self, model: PreTrainedModel, architecture: str, ranks: int) -> None:
        self._architecture = architecture
        self._ranks = ranks
        self._modules = dict(model.named_modules())
        self._shapes = {name: tuple(parameter.shape) for name, parameter in _parameters(model)}
        config = model.config.get_text_config(decoder=True)
        self._heads = int(getattr(config, "num_attention_heads", 0))
        self._kv_heads = int(getattr(config, "num_key_value_heads", None) or self._heads)
        self._cuts: dict[str, Cut] = {}
        self._takes_part: set[str] = set()
        self._summed: set[str] = set()
        self._gathered: set[str] = set()
        self._groups: dict[str, int] = {}
        self._experts: dict[str, int] = {}

    def apply(self, pattern: re.Pattern[str], style: str) -> None:
        for name, module in self._modules.items():
            if pattern.fullmatch(name):
                self._split_module(name, module, style)
        for name, shape in self._shapes.items():
            if pattern.fullmatch(name):
                self._split_parameter(name, shape, style)

    def plan(self) -> SplitPlan:
        return SplitPlan(
            self._ranks,
            self._cuts,
            frozenset(self._takes_part),
            frozenset(self._summed),
            frozenset(self._gathered),
            self._groups,
            self._experts,
        )

    def _split_module(self, name: str, module: Any, style: str) -> None:
        if style in _WHOLE:
            return
        if style in _SUMMED:
            self._summed.add(name)
            if style in _OF_EXPERTS:
                self._experts[name] = int(module.num_experts)
            return
        if not isinstance(module, nn.Linear) or style.startswith("packed"):
            raise self._refusal(f"its plan splits {name}, a {type(module).__name__}, as {style!r}")
        if style in _COLWISE | _GATHERED:
            parts = self._parts_of(name, style)
            for own in ("weight", "bias"):
                if f"{name}.{own}" in self._shapes:
                    self._cut(f"{name}.{own}", Cut(0, parts), even=style in _COLWISE)
            if style in _GATHERED:
                self._gathered.add(name)
            return
        self._cut(f"{name}.weight", Cut(1, self._ranks), even=style in _ROWWISE)
        self._summed.add(name)
        if style in _SPLITTING:
            self._takes_part.add(name)

    def _split_parameter(self, name: str, shape: tuple[int, ...], style: str) -> None:
        if style in _WHOLE | _SUMMED:
            return
        if style in _WHOLE_EXPERTS:
            self._cut(name, Cut(0, self._ranks), even=False)
            return
        packed = _PACKED_PARTS if style.startswith("packed") else 1
        if len(shape) < 2:
            raise self._refusal(f"its plan splits {name}, of shape {list(shape)}, as {style!r}")
        dim = len(shape) - (2 if style in _COLWISE else 1)
        self._cut(name, Cut(dim, self._ranks, packed))

    def _parts_of(self, name: str, style: str) -> int:
        """Return into how many parts outputs are cut. ModelRefused where heads would be."""
        parent, _, last = name.rpartition(".")
        if style in _GATHERED or not parent.endswith(("attn", "attention")):
            return self._ranks
        if self._heads % self._ranks:
            raise self._refusal(
                f"its {self._heads} attention heads (num_attention_heads) cannot be shared by {self._ranks} ranks "
                "equally: use a number that divides them"
            )
        if self._kv_heads % self._ranks == 0:
            return self._ranks
        if last in _KV_PROJECTIONS and self._ranks % self._kv_heads == 0:
            # Each KV head lies on the ranks that have its query heads.
            self._groups[parent] = self._heads // self._ranks
            return self._kv_heads
        if last in _KV_PROJECTIONS or last in ("qkv_proj", "query_key_value"):
            raise self._refusal(
                f"its {self._kv_heads} KV heads (num_key_value_heads) can be neither shared by {self._ranks} ranks nor "
                "copied to as many each: use a divisor or a multiple of them"
            )
        return self._ranks

    def _cut(self, name: str, cut: Cut, even: bool = True) -> None:
        size = self._shapes[name][cut.dim]
        if even and size % (cut.parts * cut.packed):
            raise self._refusal(
                f"{name} has {size} elements in dimension {cut.dim}, which {cut.parts} ranks cannot share equally"
            )
        self._cuts[name] = cut

    def _refusal(self, reason: str) -> ModelRefused:
        return ModelRefused(self._architecture, f"tensor_parallel {self._ranks}: {reason}")


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """List all parameters by all their names: a tied one has several."""
    return list(model.named_parameters(remove_duplicate=False))
