"""Which weight of a model a tensor of a checkpoint becomes: transformers' names, and how it joins experts.

Knows transformers' mappings. Does not know any format, nor files.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from model_worker.cpu.gemm.embedding import has_table
from model_worker.cpu.gemm.encoded_linear import EncodedWeight, JoinedExperts
from model_worker.vision.composite import text_modules
from model_worker.vision.family import is_composite

# Where the name of a tensor has the number of its expert.
_EXPERT = re.compile(r"\.experts\.(?P<number>\d+)\.")


class WeightNames:
    """Which weight of a model a tensor of a checkpoint becomes, as transformers finds it when it loads."""

    def __init__(self, auto: Any, config: PreTrainedConfig, attention: Mapping[str, str]) -> None:
        with torch.device("meta"):
            # Without memory: names and shapes alone.
            self.model: PreTrainedModel = auto.from_config(copy.deepcopy(config), **attention)
        mapping = get_model_conversion_mapping(self.model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._state = self.model.state_dict()
        self._tied: dict[str, str] = dict(getattr(self.model, "all_tied_weights_keys", None) or {})
        # What encodes images computes in a type of its own, and is not packed.
        self._packed = text_modules(self.model) if is_composite(config) else set(self.model.modules())

    def find(self, key: str) -> tuple[str, bool]:
        """Return the weight's name in the model, and whether it is stored there as it is."""
        name, pattern = self._renamed(key)
        return name, pattern is None

    def _renamed(self, key: str) -> tuple[str, str | None]:
        """Return the weight's name in the model, and the pattern by which transformers converts it, if it does."""
        prefix = self.model.base_model_prefix
        name, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self._state)
        if name not in self._state and key in self._state:
            name, pattern = rename_source_key(key, [], [], prefix, self._state)
        return name, pattern

    def is_tied(self, name: str) -> bool:
        """Whether a weight of the model is another one's, too."""
        return name in self._tied

    def has(self, key: str) -> bool:
        name, plain = self.find(key)
        return name in self._state or not plain or name.endswith(".rotary_emb.inv_freq")

    def is_real(self, key: str) -> bool:
        """Whether a tensor becomes a weight of real numbers."""
        found = self._state.get(self.find(key)[0])
        return found is not None and found.is_floating_point()

    def place_of(self, key: str, weight: EncodedWeight, tables: bool = True) -> str:
        """Return the name of the plain linear layer whose weight this is, or of the tensor, if it has that of experts.

        With `tables` also that of an embedding. Empty if there is none, and for what encodes images.
        """
        name, plain = self.find(key)
        module, _, last = name.rpartition(".")
        if not plain or name not in self._state or (owner := self.model.get_submodule(module)) not in self._packed:
            return ""
        if weight.experts:
            return name if tuple(self._state[name].shape) == weight.shape else ""
        if last != "weight" or name in self._tied:
            return ""
        stays = type(owner) is nn.Linear or (tables and has_table(owner))
        return module if stays and tuple(self._state[name].shape) == weight.shape else ""

    def with_joined_experts(self, encoded: Mapping[str, EncodedWeight]) -> dict[str, EncodedWeight]:
        """Return the weights with those of single experts as one weight under the name that it has in the model.

        Only where transformers would do no more than put the experts, and the parts of each, one behind the other.
        """
        parts: dict[str, dict[tuple[int, int], str]] = {}
        for key, weight in encoded.items():
            found = _EXPERT.search(key)
            name, pattern = self._renamed(key)
            if found is None or pattern is None or len(weight.shape) != 2 or name not in self._state:
                continue
            part = self._part_of_expert(pattern)
            if part is not None:
                parts.setdefault(name, {})[int(found["number"]), part] = key
        joined = dict(encoded)
        for name, keys in parts.items():
            whole = _joined({place: encoded[key] for place, key in keys.items()})
            if whole is not None and whole.shape == tuple(self._state[name].shape):
                for key in keys.values():
                    del joined[key]
                joined[name] = whole
        return joined

    def _part_of_expert(self, pattern: str) -> int | None:
        """Return which part of an expert's matrix tensors of this pattern are; None if they are used otherwise."""
        for converter in self._converters:
            if pattern in converter.source_patterns and len(converter.target_patterns) == 1:
                steps = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
                if steps in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
                    return converter.source_patterns.index(pattern)
        return None

    def head_of(self, module: str) -> str | None:
        """Return the name of the linear layer that has the weight of this module, too."""
        tied = (name for name, source in self._tied.items() if source == f"{module}.weight")
        heads = (name.removesuffix(".weight") for name in tied)
        return next((head for head in heads if type(self.model.get_submodule(head)) is nn.Linear), None)


def _joined(parts: Mapping[tuple[int, int], EncodedWeight]) -> JoinedExperts | None:
    """Return the weight of all experts by the parts of each (expert, part). None if parts are missing or unlike."""
    experts = 1 + max(expert for expert, _ in parts)
    count = 1 + max(part for _, part in parts)
    if len(parts) != experts * count:
        return None
    each = [[parts[expert, part] for part in range(count)] for expert in range(experts)]
    shapes = {tuple(weight.shape for weight in expert) for expert in each}
    return JoinedExperts(each) if len(shapes) == 1 and len({weight.shape[1] for weight in each[0]}) == 1 else None
