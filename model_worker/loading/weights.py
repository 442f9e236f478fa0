"""Makes the model of a config with the weights of a checkpoint, plain or quantized.

Quantized weights of linear layers, and tables of embeddings, stay encoded where they will be packed
(encoded_linear.py, embedding.py); others are decoded into plain tensors. Does not know names (weight_names.py), nor any
format.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.import_utils import is_accelerate_available

from model_worker.attention import PAGED_ATTENTION
from model_worker.cpu.gemm.embedding import keep_encoded
from model_worker.cpu.gemm.encoded_linear import EncodedWeight
from model_worker.cpu.gemm.expert_linears import keep_experts
from model_worker.hearing.encoder import hears
from model_worker.loading.gpu_kinds import Kind
from model_worker.loading.gpu_weights import kept_on_gpu, place_on_gpu
from model_worker.loading.overlays import overlaid
from model_worker.loading.quantized.read import Weights, is_quantized, read_weights
from model_worker.loading.quantized.scheme import Scheme, scheme_of
from model_worker.loading.stored import StoredCheckpoint, open_stored
from model_worker.loading.weight_names import WeightNames
from model_worker.model import ModelRefused, Progress, first_line
from model_worker.vision.family import is_composite
from shared.listening import LISTENING_TYPES
from shared.load_errors import broken_file, missing_weights

log = logging.getLogger(__name__)

# What transformers raises for weights that it cannot load.
LOAD_ERRORS = (
    OSError,
    ValueError,
    ImportError,
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    SafetensorError,
)
_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def load_weights(
    source: str | Path,
    config: PreTrainedConfig,
    architecture: str,
    dtype: torch.dtype | str,
    device: torch.device,
    overlays: Sequence[Path] = (),
) -> PreTrainedModel:
    """Load a model whose config has been accepted. ModelRefused says what is wrong with its weights.

    The tensors in the files of `overlays` take the place of the checkpoint's own; later files win.
    """
    composite = is_composite(config)
    auto, attention = model_class(config)
    checkpoint, scheme = open_checkpoint(source, config, architecture)
    refuse_type(dtype, config, architecture)
    if overlays:
        checkpoint = overlaid(checkpoint, overlays, architecture)
    if overlays or is_quantized(checkpoint, scheme):
        kinds = attention, device.type == "cpu", device.type == "cuda" and not composite
        return load_quantized(auto, checkpoint, scheme, config, architecture, dtype, device, *kinds)
    # Without accelerate all weights are in the host's memory first.
    straight = device.type != "cpu" and is_accelerate_available()
    placed = {"device_map": {"": device}} if straight else {}
    try:
        model, info = auto.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            **placed,
            **attention,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except torch.OutOfMemoryError:
        raise
    except LOAD_ERRORS as error:
        raise ModelRefused(architecture, broken_file(str(source)) or _reason(error)) from error
    check_loaded(architecture, info)
    found: PreTrainedModel = model
    return found


def model_class(config: PreTrainedConfig) -> tuple[Any, dict[str, str]]:
    """Return transformers' automatic class for a served model's config, and its arguments for attention."""
    composite = is_composite(config)
    auto: Any = AutoModelForImageTextToText if composite else AutoModelForCausalLM
    if composite and config.model_type in LISTENING_TYPES:
        auto = AutoModelForSeq2SeqLM
    if hears(config):
        auto = AutoModelForSpeechSeq2Seq
    # Of a composite model only the text model attends to the paged cache, which the runner sees to.
    return auto, {} if composite or hears(config) else {"attn_implementation": PAGED_ATTENTION}


def open_checkpoint(
    source: str | Path, config: PreTrainedConfig, architecture: str, subfolder: str = ""
) -> tuple[StoredCheckpoint, Scheme]:
    """Open the files of weights and read what they say about quantization. ModelRefused names what is wrong."""
    try:
        scheme = scheme_of(source, config)
        checkpoint = open_stored(source, subfolder)
    except (ValueError, OSError) as error:
        raise ModelRefused(architecture, broken_file(str(source)) or first_line(error)) from error
    if not checkpoint.tensors:
        raise ModelRefused(architecture, missing_weights(Path(source).expanduser() / subfolder))
    return checkpoint, scheme


def refuse_type(dtype: torch.dtype | str, config: PreTrainedConfig, architecture: str) -> None:
    stored = getattr(config, "dtype", None)
    if dtype == "auto" and stored == torch.float64:
        raise ModelRefused(
            architecture, "config.json has dtype float64, in which nothing is computed here: use --dtype float32"
        )


@dataclass(frozen=True, eq=False)
class _Decoded:
    """A weight that transformers decodes by indexing it, as it reads a tensor of a file."""

    source: EncodedWeight
    dtype: torch.dtype

    def __getitem__(self, _: Any) -> Tensor:
        decoded = self.source.decoded(self.dtype)
        self.source.let_go()
        return decoded


@dataclass(frozen=True, eq=False)
class _Placeholder:
    """Stands for a weight that stays encoded, and takes no memory."""

    source: EncodedWeight
    dtype: torch.dtype

    def __getitem__(self, _: Any) -> Tensor:
        return torch.zeros(1, dtype=self.dtype).expand(self.source.shape)


def load_quantized(
    auto: Any,
    checkpoint: StoredCheckpoint,
    scheme: Scheme,
    config: PreTrainedConfig,
    architecture: str,
    dtype: torch.dtype | str,
    device: torch.device,
    attention: Mapping[str, str],
    lazily: bool,
    stays_on_gpu: bool = False,
) -> PreTrainedModel:
    """Load a model with quantized weights. `lazily` leaves those of linear layers encoded, and `stays_on_gpu` those
    whose products the device is proven to compute as they are."""
    try:
        weights = read_weights(checkpoint, scheme)
    except LOAD_ERRORS as error:
        raise ModelRefused(architecture, f"its quantized weights cannot be read: {_reason(error)}") from error
    config = without_quantization(config)
    kind = computing_dtype(dtype, config, weights, architecture, device)
    # Some libraries write the type of quantized numbers here, in which no model can be made.
    config.dtype = kind
    try:
        names = WeightNames(auto, config, attention)
        encoded = names.with_joined_experts(weights.encoded) if lazily or stays_on_gpu else weights.encoded
        targets = {
            key: names.place_of(key, weight, tables=lazily) for key, weight in encoded.items() if lazily or stays_on_gpu
        }
        kinds: dict[str, Kind] = {}
        if stays_on_gpu:
            places = {module: encoded[key] for key, module in targets.items() if module}
            kinds = kept_on_gpu(places, names.model, device, architecture, kind, scheme.rounds_inputs)
            targets = {key: module for key, module in targets.items() if module in kinds}
        _check_types(names, weights, architecture)
        _check_unplaced(names, weights, architecture)
        _check_overlaid(names, checkpoint, architecture)
        tensors: dict[str, Any] = {key: tensor.slice for key, tensor in weights.plain.items()}
        for key, weight in encoded.items():
            tensors[key] = _Placeholder(weight, kind) if targets.get(key) else _Decoded(weight, kind)
        # The automatic class would look for an adapter beside the files, of which there is no folder here.
        model, info = auto._model_mapping[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=kind,
            **attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except LOAD_ERRORS as error:
        if isinstance(error, ModelRefused | torch.OutOfMemoryError):
            raise
        raise ModelRefused(architecture, _reason(error)) from error
    check_loaded(architecture, info)
    place_on_gpu(model, {targets[key]: encoded[key] for key in targets}, kinds)
    for key, module in targets.items() if lazily else ():
        if module and encoded[key].experts:
            keep_experts(model, module, encoded[key], kind)
        elif module:
            keep_encoded(model, module, encoded[key], kind)
            if (head := names.head_of(module)) is not None:
                keep_encoded(model, head, encoded[key], kind)
    if not weights.encoded:
        if not scheme.method:
            return _typed(model)
        log.warning("%s: %s names a quantization, and no weight of the files is quantized", architecture, scheme.file)
        return _typed(model)
    decoded = [weight for key, weight in encoded.items() if not targets.get(key)]
    size = sum(math.prod(weight.shape) for weight in decoded) * kind.itemsize
    said = f"{len(decoded)} are decoded to {kind}, {size / 1e9:.2f} GB"
    if lazily:
        said = f"stay so until they are packed; {said}" if decoded else "stay so until they are packed"
    log.info(
        "%s: %d weights are quantized by %s, and %s",
        architecture,
        len(weights.encoded),
        weights.method or "a method that no file names",
        said,
    )
    return _typed(model)


def _typed(model: Any) -> PreTrainedModel:
    loaded: PreTrainedModel = model
    return loaded


def check_loaded(architecture: str, info: Mapping[str, Any]) -> None:
    """Refuse a model that lacks weights, or whose weights have other shapes. Log tensors that it has no place for."""
    # transformers fills what a checkpoint lacks with random numbers and a warning: that is not a model to serve.
    if missing := sorted(info["missing_keys"]):
        raise ModelRefused(architecture, f"the checkpoint lacks {len(missing)} of its weights, such as {missing[0]}")
    if mismatched := sorted(info["mismatched_keys"]):
        key, stored, wanted = mismatched[0]
        raise ModelRefused(
            architecture,
            f"{len(mismatched)} weights of the checkpoint do not fit its config: "
            f"{key} is {list(stored)} and should be {list(wanted)}",
        )
    _say_unplaced(architecture, sorted(info["unexpected_keys"]))


def _check_types(names: WeightNames, weights: Weights, architecture: str) -> None:
    """Refuse weights whose numbers are codes of which no tensor says the meaning: the codes are not the weight."""
    coded = [tensor for tensor in weights.plain.values() if tensor.dtype not in _FLOATS and names.is_real(tensor.name)]
    if coded:
        one = coded[0]
        raise ModelRefused(
            architecture,
            f"{len(coded)} weights are codes without scales, such as {one.name} ({one.dtype} {list(one.shape)}): no "
            "tensor beside it (weight_scale, SCB and the like) says what they stand for; download the files anew, or "
            "serve the model that was not quantized",
        )


def _check_unplaced(names: WeightNames, weights: Weights, architecture: str) -> None:
    """Refuse a bias that the model would leave out. Zeros, which some formats write everywhere, are left out."""
    for key, tensor in list(weights.plain.items()):
        is_bias = key.endswith(".bias") and f"{key.removesuffix('bias')}weight" in weights.encoded
        if is_bias and not names.has(key):
            if bool(tensor.read().any()):
                raise ModelRefused(architecture, f"{key} is not zero, and the model has no place for it")
            del weights.plain[key]


def _check_overlaid(names: WeightNames, checkpoint: StoredCheckpoint, architecture: str) -> None:
    """Refuse tensors that were sent for weights which the model has not."""
    unknown = [key for key in checkpoint.replaced if not names.has(key)]
    if unknown:
        raise ModelRefused(
            architecture,
            f"{unknown[0]!r:.200} is no weight of this model: send tensors under the names that its checkpoint has",
        )


def _say_unplaced(architecture: str, keys: list[str]) -> None:
    if keys:
        log.warning(
            "%s has no place for %d tensors of the checkpoint, such as %s: they are not used",
            architecture,
            len(keys),
            ", ".join(keys[:3]),
        )


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy that transformers takes for that of a plain model."""
    plain = copy.deepcopy(config)
    for each in (plain, plain.get_text_config(decoder=True)):
        for name in ("quantization_config", "compression_config"):
            if hasattr(each, name):
                delattr(each, name)
    return plain


def computing_dtype(
    dtype: torch.dtype | str,
    config: PreTrainedConfig,
    weights: Weights,
    architecture: str,
    device: torch.device,
) -> torch.dtype:
    """Return the type that decoded weights are used in: what is asked for, else the config's, else the stored ones'."""
    found: Any = dtype
    if dtype == "auto":
        found = getattr(config, "dtype", None) or getattr(config.get_text_config(decoder=True), "dtype", None)
        if found not in _FLOATS.values():
            stored = [tensor.dtype for tensor in weights.plain.values() if tensor.dtype in _FLOATS]
            found = _FLOATS[stored[0]] if stored else torch.bfloat16
    # CPUs have no fast float16, and bfloat16 takes the same memory.
    return torch.bfloat16 if found == torch.float16 and device.type == "cpu" else found


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is unknown or missing in its files"
    return first_line(error)


class _WeightsBar:
    """Stands in for transformers' tqdm bar, and reports to `progress` how many weights are in place."""

    def __init__(self, weights: Iterable[Any], total: int, progress: Progress) -> None:
        self._weights = weights
        self._total = total
        self._progress = progress

    def __iter__(self) -> Iterator[Any]:
        self._progress("load weights", 0, self._total)
        for done, weight in enumerate(self._weights, start=1):
            yield weight
            self._progress("load weights", done, self._total)


@contextmanager
def reported_weights(progress: Progress) -> Iterator[None]:
    """Turn transformers' bar over the weights into calls of `progress`, within this context; other bars stay as they
    are."""

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("desc") == "Loading weights" and args:
            return _WeightsBar(args[0], len(args[0]), progress)
        return factory(*args, **kwargs)

    previous = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
