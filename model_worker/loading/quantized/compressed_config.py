"""What config.json says of weights of compressed-tensors: formats, bits, groups, zeros, and the order of inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_worker.loading.quantized.scheme import Scheme, sides_of, whole_number

# Formats of config.json that are read here.
FORMATS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
# Whether a tensor g_idx says the order of inputs, by the values of actorder.
_ORDERS = {None: False, False: False, "weight": False, "static": False, True: True, "group": True, "dynamic": True}
_ALL_INPUTS = -1


@dataclass(frozen=True)
class Arguments:
    """The fields `weights` of a group of config.json, which are read when they are asked for. ValueError names one that
    cannot be read."""

    fields: Mapping[str, Any]
    path: str
    file: str

    @property
    def bits(self) -> int:
        return whole_number(self.fields.get("num_bits"), f"{self.path}.num_bits", self.file)

    @property
    def group_size(self) -> int | None:
        """How many inputs share a scale; -1 for all of them, None where it is not said."""
        given = self.fields.get("group_size")
        if given is not None and given != _ALL_INPUTS:
            return whole_number(given, f"{self.path}.group_size", self.file)
        return _ALL_INPUTS if given is not None or self.fields.get("strategy") in ("channel", "tensor") else None

    @property
    def has_zeros(self) -> bool:
        given = self.fields.get("symmetric")
        if given not in (None, True, False):
            raise ValueError(f"{self.file} has {self.path}.symmetric {given!r}; it must be true or false")
        return given is False

    @property
    def is_ordered(self) -> bool:
        given = self.fields.get("actorder")
        try:
            return _ORDERS[given.lower() if isinstance(given, str) else given]
        except (KeyError, TypeError):
            raise ValueError(
                f"{self.file} has {self.path}.actorder {given!r}; group, weight, static and dynamic can be read here"
            ) from None

    @property
    def block(self) -> tuple[int, int] | None:
        given = self.fields.get("block_structure")
        return None if given is None else sides_of(given, f"{self.path}.block_structure", self.file)


def check_compressed(scheme: Scheme) -> None:
    """Refuse what config.json names and is not read here. ValueError names field and value."""
    groups = scheme.get("config_groups", {})
    if not isinstance(groups, Mapping):
        raise ValueError(
            f"{scheme.file} has config_groups {groups!r:.80}; it must be an object with a group for each name"
        )
    for field in ("format", *(f"config_groups.{name}.format" for name in groups)):
        value: Any = scheme.fields
        for part in field.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value not in FORMATS:
            raise ValueError(
                f"{scheme.file} names the format {value!r} ({field}) of compressed-tensors; readable are "
                f"{', '.join(FORMATS)}"
            )
    transforms = scheme.get("transform_config", {})
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise ValueError(
            f"{scheme.file} has a transform_config: its activations must be rotated before each product, and they are "
            "not rotated here"
        )
    sparsity = scheme.get("sparsity_config", {})
    kind = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    if kind not in (None, "dense"):
        raise ValueError(f"{scheme.file} names the sparsity_config {kind!r}; only dense weights can be read here")


def arguments_for(scheme: Scheme, target: str) -> list[Arguments]:
    """Return what may be said of a weight: by the groups that name its layer, else by all groups, since others name
    classes of layers, which files do not have."""
    groups = scheme.get("config_groups", {})
    found: list[Arguments] = []
    named: list[Arguments] = []
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            found.append(Arguments(weights, f"config_groups.{name}.weights", scheme.file))
            if _names(group.get("targets"), target.removesuffix(".weight")):
                named.append(found[-1])
    return named or found


def _names(targets: Any, layer: str) -> bool:
    """Whether one of the targets is the layer's name, or an expression for it."""
    for one in targets if isinstance(targets, list) else ():
        try:
            if one == layer or (str(one).startswith("re:") and re.match(str(one)[3:], layer)):
                return True
        except re.error:
            continue
    return False
