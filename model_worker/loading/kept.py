"""Makes a model of weights that a keeper has, and gives it those of a model that was read from files.

What is kept are the tensors of the finished model: joined, rounded, on the device. The next worker makes the modules
without them, as transformers does for a checkpoint, puts them there, and proves the model as after any load. Does not
know how memory is shared.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from model_worker.cuda.encoded_experts import PROJECTIONS, ExpertStack, Fp8Experts, GroupedExperts, put_stacks
from model_worker.cuda.fp8_blocks import BlockFp8Linear
from model_worker.cuda.fp8_linear import Fp8Linear
from model_worker.cuda.grouped_linear import Coding, GroupedLinear
from model_worker.keeper.kept_weights import Found, KeptWeights, ModelFacts
from model_worker.loading.placeholder import Placeholder
from model_worker.loading.weights import LOAD_ERRORS, check_loaded, model_class, without_quantization
from model_worker.model import LoadedModel, ModelRefused, first_line
from model_worker.vision.composite import tower_parameters
from model_worker.vision.family import is_composite
from shared.weights_file import stamp_of

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Keeping:
    """The weights of one load, and the keeper of them. Without an identity nothing is found, and nothing kept."""

    weights: KeptWeights
    identity: str
    _facts: ModelFacts | None = None
    # Those of the text model, and of what encodes images for it.
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _tower: dict[str, Tensor] = field(default_factory=dict)

    def model(self, config: PreTrainedConfig, architecture: str) -> PreTrainedModel | None:
        """Return the model with the weights that are kept; None if it must be read from its files."""
        # Of a name on the hub, whose files may be others than when the identity was made.
        commit = getattr(config, "_commit_hash", None)
        if self.identity and commit:
            self.identity += f" {commit}"
        found = self.weights.find(self.identity) if self.identity else None
        if found is None:
            return None
        try:
            return kept_model(found, config, architecture)
        except torch.OutOfMemoryError:
            raise
        except LOAD_ERRORS as error:
            log.warning("the weights are read from files, since those that were kept make no model: %s", _said(error))
        # The error, and with it the modules that were made, has gone.
        del found
        gc.collect()
        self.weights.drop()
        return None

    def prepared(
        self, config: PreTrainedConfig, architecture: str, prepare: Callable[[PreTrainedModel], LoadedModel]
    ) -> LoadedModel | None:
        """Return the model with the weights that are kept, as `prepare` makes it ready; None if it must be read."""
        model = self.model(copy.deepcopy(config), architecture)
        if model is None:
            return None
        try:
            return prepare(model)
        except ModelRefused as error:
            said = "the weights are read from files, since a model of those that were kept fails its proof: %s"
            log.warning(said, error.reason)
        for parameter in model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        del model
        gc.collect()
        self.weights.drop()
        return None

    def note(self, model: PreTrainedModel, vision: bool = True) -> None:
        """Note the tensors of a model that was read, on the device: they may change before they are kept.

        Nothing is noted, and so nothing held, of a model that is kept already, or will not be, nor without `vision`
        what encodes images.
        """
        if not (self.identity and self.weights.able) or self.weights.size:
            return
        kinds = [
            [name for name, one in model.named_modules() if type(one) is kind] for kind in (Fp8Linear, BlockFp8Linear)
        ]
        # Speech and texts to embed have none.
        generation: Any = getattr(model, "generation_config", None)
        text = "" if generation is None else generation.to_json_string(use_diff=False)
        tensors = dict(model.state_dict(keep_vars=True))
        of_tower = _tower_of(model)
        tower = {name: tensor for name, tensor in tensors.items() if id(tensor) in of_tower}
        unused = {} if vision else {name: (_name(tensor.dtype), list(tensor.shape)) for name, tensor in tower.items()}
        grouped: dict[str, tuple[int, int, bytes]] = {
            name: one.coding for name, one in model.named_modules() if isinstance(one, GroupedLinear)
        }
        experts: dict[str, tuple[list[int], tuple[int, int, bytes] | None]] = {
            name: (list(one.shape), one.coding if isinstance(one, GroupedExperts) else None)
            for name, one in model.named_modules()
            if isinstance(one, ExpertStack)
        }
        self._facts = ModelFacts(_name(model.dtype), text, kinds[0], kinds[1], grouped, experts, unused)
        self._tensors = {name: tensor for name, tensor in tensors.items() if name not in tower}
        self._tower = tower if vision else {}

    def keep(self) -> None:
        """Have what was noted kept for the next worker."""
        if self._facts is not None:
            with torch.no_grad():
                self.weights.keep(self.identity, self._facts, self._tensors, self._tower)
        self._tensors, self._tower = {}, {}


def _tower_of(model: PreTrainedModel) -> set[int]:
    """Identify the parameters that encode images. None of a model that is refused when it is taken apart."""
    if is_composite(model.config):
        with contextlib.suppress(StopIteration, AttributeError):
            return {id(parameter) for parameter in tower_parameters(model)}
    return set()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def identity_of(source: str, overlays: list[str], *settings: object) -> str:
    """Name the weights that these files and settings make; empty, with a line of the log, where files do not tell."""
    try:
        folder = _folder_of(source)
        stamp = "" if folder is None else stamp_of(str(folder), overlays)
        versions = _sources(), torch.__version__, transformers.__version__
    except OSError as error:
        log.warning("the weights are not kept for the next worker, since their files cannot be told apart: %s", error)
        return ""
    if folder is None:
        log.info("the weights are not kept for the next worker, since %s is no folder here", source)
        return ""
    facts = str(folder), stamp, overlays, versions, settings
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()


@functools.cache
def _sources() -> str:
    """Name this code: that of another version may make other tensors of the same files and settings."""
    digest = blake2b(digest_size=16)
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _folder_of(source: str) -> Path | None:
    """Return the folder of a model, which for a name on the hub is in its cache."""
    path = Path(source).expanduser()
    if path.exists():
        return path if path.is_dir() else None
    try:
        found = try_to_load_from_cache(source, "config.json")
    except ValueError:  # no name that the hub could have
        return None
    return Path(found).parent if isinstance(found, str) else None


def kept_model(found: Found, config: PreTrainedConfig, architecture: str) -> PreTrainedModel:
    """Make the model of a config with tensors that are kept. Raises one of LOAD_ERRORS where they do not fit."""
    auto, attention = model_class(config)
    config = without_quantization(config)
    found = replace(found, tensors=found.tensors | _unused(found))
    dtype = getattr(torch, found.facts.dtype)
    model, info = auto._model_mapping[type(config)].from_pretrained(
        None,
        config=config,
        state_dict=_placeholders(found, dtype),
        dtype=dtype,
        **attention,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    check_loaded(architecture, info)
    for name in _encoded(found.facts):
        model.set_submodule(name, _encoded_linear(found, name))
    for owner in dict.fromkeys(name.rpartition(".")[0] for name in found.facts.experts):
        put_stacks(model.get_submodule(owner), [_stack(found, f"{owner}.{name}", dtype) for name in PROJECTIONS])
    if other := sorted(model.state_dict().keys() ^ found.tensors.keys()):
        raise ModelRefused(architecture, f"its modules and what is kept differ in {other[0]}")
    _put(model, found.tensors)
    if found.facts.generation:
        model.generation_config = GenerationConfig.from_dict(json.loads(found.facts.generation))
    made: PreTrainedModel = model
    return made


def _unused(found: Found) -> dict[str, Tensor]:
    """Make tensors of zeros that take no memory, where nothing computes with what was there."""
    device = next(iter(found.tensors.values())).device
    return {
        name: torch.zeros((), dtype=getattr(torch, dtype), device=device).expand(shape)
        for name, (dtype, shape) in found.facts.unused.items()
    }


def _placeholders(found: Found, dtype: torch.dtype) -> dict[str, Any]:
    """Name the tensors as in a plain checkpoint."""
    given: dict[str, Any] = {}
    encoded = _encoded(found.facts)
    for name, (shape, _) in found.facts.experts.items():
        given[name] = Placeholder(tuple(shape), dtype)
    for name, tensor in found.tensors.items():
        path, _, leaf = name.rpartition(".")
        if path in found.facts.experts:
            continue
        if path not in encoded or leaf == "bias":
            given[name] = Placeholder(tuple(tensor.shape), tensor.dtype)
        elif leaf == "codes":
            outputs, width = tensor.shape
            coding = found.facts.in_groups.get(path)
            inputs = width if coding is None else Coding(*coding).numbers * width
            given[f"{path}.weight"] = Placeholder((outputs, inputs), dtype)
    return given


def _encoded(facts: ModelFacts) -> set[str]:
    """Name the linear modules whose weights are not plain."""
    return {*facts.in_fp8, *facts.in_fp8_blocks, *facts.in_groups}


def _encoded_linear(found: Found, name: str) -> Fp8Linear | BlockFp8Linear | GroupedLinear:
    codes, scales, bias = (found.tensors.get(f"{name}.{part}") for part in ("codes", "scales", "bias"))
    if codes is None or scales is None:
        raise ValueError(f"{name} has no codes or no scales")
    if name in found.facts.in_groups:
        zeros, order = (found.tensors.get(f"{name}.{part}") for part in ("zeros", "order"))
        return GroupedLinear(codes, scales, zeros, Coding(*found.facts.in_groups[name]), order, bias)
    return Fp8Linear(codes, scales[0], bias) if name in found.facts.in_fp8 else BlockFp8Linear(codes, scales, bias)


def _stack(found: Found, name: str, dtype: torch.dtype) -> ExpertStack:
    """Return the experts of a projection, whose decoded weight is of `dtype`."""
    codes, scales, zeros, order = (
        found.tensors.get(f"{name}.{part}") for part in ("codes", "scales", "zeros", "order")
    )
    if codes is None or scales is None or name not in found.facts.experts:
        raise ValueError(f"{name} has no codes or no scales")
    coding = found.facts.experts[name][1]
    if coding is None:
        return Fp8Experts(codes, scales, dtype)
    return GroupedExperts(codes, scales, zeros, Coding(*coding), order, dtype)


def _put(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put tensors into the places of their names. One that has several names stays one parameter."""
    made: dict[tuple[object, ...], nn.Parameter] = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._buffers:
            # Those are few, and may be written to.
            module._buffers[leaf] = tensor.clone()
            continue
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, tensor.stride())
        module._parameters[leaf] = made.setdefault(place, nn.Parameter(tensor, requires_grad=False))


def _said(error: Exception) -> str:
    return error.reason if isinstance(error, ModelRefused) else first_line(error)
