"""Loads a model with transformers and proves that it works on the paged KV cache, or refuses it with the reason.

Knows where weights come from and what the rest of the worker must know about a model. Does not know how many blocks it
will get, nor who asks for it.
"""

from __future__ import annotations

import errno
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from model_worker.attention import PAGED_ATTENTION, cuda
from model_worker.cpu.fused.stack import FusedStack, fused_stack
from model_worker.cpu.gemm.int8_linear import Rounded
from model_worker.cpu.gemm.packed_linear import pack_linears, round_linears
from model_worker.loading import verify
from model_worker.loading.probe import AttentionLayers, ModelRefused, probe_attention
from model_worker.loading.rope import pin_longrope
from shared.load_errors import broken_file

log = logging.getLogger(__name__)

BLOCK_SIZE = 16
"""Tokens of a KV block where the attention backend does not mind."""

Progress = Callable[[str, int, int], None]  # what is being done, how much is done, out of how much

# What transformers' configs call the layers whose only state is a KV cache.
PAGED_LAYERS = {"full_attention", "sliding_attention", "attention"}

# What packing many sequences into one forward pass takes.
NEEDED_ARGUMENTS = {"position_ids", "logits_to_keep"}

QUANTIZATIONS = ("none", "int8")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Unproven(NamedTuple):
    """What waits for compiled kernels: the stack, if the model has the form of one, and its proof."""

    stack: FusedStack | None
    proves_itself: Callable[[], bool]


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that has passed its self-check, and the facts about it that others need."""

    model: PreTrainedModel
    attention: AttentionLayers
    device: torch.device
    dtype: torch.dtype
    architecture: str
    vocab_size: int  # the width of the logits, which may exceed the tokenizer's vocabulary
    max_position: int | None  # positions the model was made for; None if it sets no limit
    eos_token_ids: tuple[int, ...]
    parameter_count: int
    parameter_bytes: int  # as they are kept: a quantized weight takes less, a packed tied embedding a second copy
    stack: FusedStack | None = None  # the same model in one compiled call, for CPUs
    unproven: Unproven | None = None  # what will be `stack` once kernels are compiled; None if they are
    backend: str = "auto"  # the attention backend that serves this model, as ModelRunner takes it

    @property
    def block_size(self) -> int:
        """Tokens of a KV block, as the backend likes them."""
        return cuda.BLOCK_SIZE if self.backend == "cuda" else BLOCK_SIZE


def load_model(
    source: str | Path,
    dtype: str,
    device: str,
    progress: Progress,
    max_model_len: int | None = None,
    quantization: str = "none",
    deferred: Callable[[torch.dtype], bool] = lambda _: False,
) -> LoadedModel:
    """Load a Hugging Face directory or hub name.

    `dtype` is "auto" (the checkpoint's, but bfloat16 for a float16 one on a CPU) or a key of DTYPES. `max_model_len` is
    the longest sequence that will be served, the model's own limit by default. `quantization` is one of QUANTIZATIONS:
    int8 rounds the weights of linear layers, per output, and proves the model against itself with these weights.
    `deferred` says of which weights' type kernels must not be run yet, on a CPU.
    """
    target = torch.device(device)
    wanted_dtype = weights_dtype(dtype, target)
    _check_quantization(quantization, target)
    _check_device(target)
    config = read_config(source)
    architecture = _refuse_by_config(config)
    max_position = _max_position(config)
    check_positions(max_model_len, max_position)
    with _reported_weights(progress):
        model = _load_weights(source, config, architecture, wanted_dtype)
    if target.type == "cpu":
        _half_as_bfloat16(model)
    elif target.index is not None and target.type == "cuda":
        # Streams and graphs are made on the current device.
        torch.cuda.set_device(target)
    nn.Module.to(model, target)
    if max_position is not None:
        pin_longrope(model, min(max_position, max_model_len or max_position))
    return prove(model.eval(), target, quantization, progress, deferred)


def _half_as_bfloat16(model: PreTrainedModel) -> None:
    """CPUs have no fast float16, and bfloat16 takes the same memory. Buffers (rotary frequencies) keep their dtype."""
    for parameter in model.parameters():
        if parameter.dtype == torch.float16:
            parameter.data = parameter.data.to(torch.bfloat16)


def weights_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    if dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown: use one of auto, {', '.join(DTYPES)}")
    if dtype == "float16" and device.type == "cpu":
        raise ValueError("dtype 'float16' is not supported on the CPU: use bfloat16 (same memory) or float32 (exact)")
    return DTYPES[dtype]


def _check_quantization(quantization: str, device: torch.device) -> None:
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization {quantization!r} is unknown: use one of {', '.join(QUANTIZATIONS)}")
    if quantization != "none" and device.type != "cpu":
        raise ValueError(
            f"quantization {quantization!r} is not supported on {device}, only on the CPU: "
            "use quantization none, or devices cpu"
        )


def check_positions(max_model_len: int | None, max_position: int | None) -> None:
    if max_model_len is not None and max_position is not None and max_model_len > max_position:
        raise ValueError(f"max_model_len must be at most the model's {max_position} positions, got {max_model_len}")


def _check_device(device: torch.device) -> None:
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceMissing(device)


class DeviceMissing(OSError):
    """There is no such GPU now. One whose driver is still being loaded comes later."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(errno.ENODEV, f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs, not {device}")

    def __str__(self) -> str:
        return f"{self.strerror}; `tokenyard doctor` says what is there"


def read_config(source: str | Path) -> PreTrainedConfig:
    """The model's config, from a directory or from the hub (or its local cache)."""
    path = Path(source).expanduser()
    looks_local = isinstance(source, Path) or source.startswith((".", "/", "~"))
    if looks_local and not path.is_dir():
        raise ModelRefused(str(source), "there is no such directory")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelRefused(str(source), "the directory has no config.json, so it is not a Hugging Face model")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            path if path.is_dir() else source, trust_remote_code=False
        )
        return config
    except (OSError, ValueError) as error:
        reason = broken_file(str(path)) or first_line(error)
        if "trust_remote_code" in str(error):
            reason = "it needs Python code of its own (trust_remote_code), and code from a checkpoint is never run"
        elif not path.is_dir():
            reason = f"there is no such directory here, and as a hub name: {reason}"
        raise ModelRefused(str(source), reason) from error


def _refuse_by_config(config: PreTrainedConfig) -> str:
    """Refuse before any weight is read what cannot work. Returns the name of the architecture."""
    name: str = (config.architectures or [config.model_type])[0]
    if config.is_encoder_decoder:
        raise ModelRefused(name, "it is an encoder-decoder, and only decoders are served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelRefused(name, f"transformers has no decoder (causal language model) for {config.model_type!r}")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    name = model_class.__name__
    layer_types = getattr(config.get_text_config(decoder=True), "layer_types", None)
    other = sorted(set(layer_types or ()) - PAGED_LAYERS)
    if other:
        raise ModelRefused(
            name, f"its layers of type {', '.join(other)} are not full or sliding-window attention over a KV cache"
        )
    # A hybrid architecture may be configured without its recurrent layers; if it is, its layer types say so.
    if getattr(model_class, "_is_stateful", False) and not layer_types:
        raise ModelRefused(name, "it keeps a recurrent state, and only attention over a KV cache is served")
    if not model_class._can_set_attn_implementation():
        raise ModelRefused(name, "its attention does not go through transformers' attention registry")
    if lacking := NEEDED_ARGUMENTS - set(inspect.signature(model_class.forward).parameters):
        raise ModelRefused(name, f"its forward pass takes no {' and no '.join(sorted(lacking))}")
    return name


def _load_weights(
    source: str | Path, config: PreTrainedConfig, architecture: str, dtype: torch.dtype | str
) -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM  # typed for one return value, and there are two with loading info
    model: PreTrainedModel
    try:
        model, info = auto.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            attn_implementation=PAGED_ATTENTION,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ModelRefused(architecture, broken_file(str(source)) or first_line(error)) from error
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
    return model


def first_line(error: Exception) -> str:
    """transformers' messages run over paragraphs; the first one says what is wrong."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def prove(
    model: PreTrainedModel,
    device: torch.device,
    quantization: str,
    progress: Progress,
    deferred: Callable[[torch.dtype], bool] = lambda _: False,
) -> LoadedModel:
    """Find the attention layers, make the model fast, then check it against the model as transformers runs it."""
    architecture, config = type(model).__name__, model.config.get_text_config(decoder=True)
    tokens = verify.tokens(config, device)
    count, size = _parameters(model)
    said = _quantize(model, architecture) if quantization == "int8" else {}
    try:
        with torch.inference_mode():
            expected = verify.eager_logits(model, tokens)
            attention = probe_attention(model, tokens[:1])
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        if isinstance(error, ModelRefused):
            raise
        reason = f"a forward pass over plain tokens fails: {first_line(error)}"
        raise ModelRefused(architecture, reason) from error
    loaded = LoadedModel(
        model=model,
        attention=attention,
        device=device,
        dtype=model.dtype,
        architecture=architecture,
        vocab_size=expected.shape[-1],
        max_position=_max_position(config),
        eos_token_ids=_eos_token_ids(model),
        parameter_count=count,
        parameter_bytes=size,
    )
    if device.type == "cpu":
        packed = pack_linears(model, lambda done, total: progress("pack weights", done, total), said)
        size = _parameters(model)[1] + sum(linear.num_bytes for linear in packed)
        loaded = replace(loaded, parameter_bytes=size, stack=fused_stack(loaded))
    if device.type == "cuda":
        verify.check_paged(loaded, tokens, expected)
        return replace(loaded, backend=_cuda_backend(loaded, tokens, expected))

    def proves_itself() -> bool:
        return loaded.stack is None or not verify.stack_differs(loaded, tokens, expected)

    awaited = quantization == "none" and deferred(loaded.dtype)
    if loaded.stack is not None and not awaited and proves_itself():
        return loaded
    # The modules serve, at least for now.
    modules = replace(loaded, stack=None, unproven=Unproven(loaded.stack, proves_itself) if awaited else None)
    verify.check_paged(modules, tokens, expected)
    return modules


def _cuda_backend(loaded: LoadedModel, tokens: torch.Tensor, expected: torch.Tensor) -> str:
    """The kernel of the device if it can attend for this model and has proven it; else plain torch, and why."""
    layers = loaded.attention
    reason = cuda.unsupported(layers.layout, layers.params, loaded.device)
    if reason is None:
        try:
            verify.check_paged(loaded, tokens, expected, "cuda", cuda.BLOCK_SIZE)
            return "cuda"
        except (RuntimeError, ModelRefused) as error:
            reason = first_line(error)
    log.warning("%s attends in plain torch, which is slow: %s", loaded.architecture, reason)
    return "reference"


def _parameters(model: PreTrainedModel) -> tuple[int, int]:
    """How many numbers, and their bytes."""
    parameters = list(model.parameters())
    return sum(parameter.numel() for parameter in parameters), sum(parameter.nbytes for parameter in parameters)


def _quantize(model: PreTrainedModel, architecture: str) -> dict[nn.Module, Rounded]:
    said = round_linears(model)
    if not said:
        raise ModelRefused(
            architecture, "it has no plain linear layer, and int8 quantizes only these; use quantization none"
        )
    return said


def _max_position(config: PreTrainedConfig) -> int | None:
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The generation config's end tokens, which may be several; else the config's."""
    for config in (model.generation_config, model.config.get_text_config(decoder=True)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


class _WeightsBar:
    """Looks like a tqdm bar to transformers and tells `progress` how many weights are in place."""

    def __init__(self, weights: Iterable[Any], total: int, progress: Progress) -> None:
        self._weights, self._total, self._progress = weights, total, progress

    def __iter__(self) -> Iterator[Any]:
        self._progress("load weights", 0, self._total)
        for done, weight in enumerate(self._weights, start=1):
            yield weight
            self._progress("load weights", done, self._total)


@contextmanager
def _reported_weights(progress: Progress) -> Iterator[None]:
    """Within it, transformers' bar over the weights becomes calls of `progress`; other bars stay as they are."""

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("desc") == "Loading weights" and args:
            return _WeightsBar(args[0], len(args[0]), progress)
        return factory(*args, **kwargs)

    previous = transformers_logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
