"""Makes a loaded model fast, and verifies that it still gives the logits of transformers' own forward pass.

Knows which ways to run a model there are. Does not know where weights come from.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from model_worker.agreement import Agreed
from model_worker.cpu import kernel_cache
from model_worker.cpu.fused.stack import fused_stack
from model_worker.cpu.gemm.coded_linear import CodedLinear
from model_worker.cpu.gemm.embedding import CodedEmbedding, EncodedEmbedding, decode_all
from model_worker.cpu.gemm.encoded_linear import EncodedLinear
from model_worker.cpu.gemm.int8_linear import Quantized
from model_worker.cpu.gemm.packed_linear import keeps_codes, pack_linears, quantize_linears
from model_worker.cpu.gemm.panel_linear import PanelLinear
from model_worker.cuda.encoded_experts import GroupedExperts
from model_worker.cuda.grouped_linear import GroupedLinear
from model_worker.host_memory import trim_heap
from model_worker.loading import verify
from model_worker.loading.gpu_attention import choose_attention
from model_worker.loading.gpu_layers import fuse_layers
from model_worker.loading.gpu_modules import ReplacedModules
from model_worker.loading.probe import probe_attention
from model_worker.loading.recurrent import follow_time_step_limit, probe_recurrent, refuse_time_step_limit
from model_worker.model import LoadedModel, ModelRefused, Progress, first_line, max_position_of
from model_worker.recurrent.families import is_recurrent
from model_worker.recurrent.mixers import replace_forwards

log = logging.getLogger(__name__)

# Errors of torch for numbers whose shape or type is not that of the format.
_DECODING_ERRORS = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
# What K and V in codes may change of logits of random tokens, relative to them: more is warned of, or refused. Of
# Qwen2.5-Coder-0.5B int8 changes 0.14, and perplexity rises by 1 %.
_MUCH_KV_CHANGE = 0.2
_MOST_KV_CHANGE = 0.5


def prepare(
    model: PreTrainedModel,
    device: torch.device,
    quantization: str,
    progress: Progress,
    has_kernels: Callable[[torch.dtype, str], bool] = lambda *_: True,
    kv_dtype: str = "auto",
    fuses: bool = True,
    agreed: Agreed | None = None,
) -> LoadedModel:
    """Find the attention layers, make the model fast, then check it against the model as transformers runs it.

    `has_kernels` says for the weights' dtype whether a CPU's kernels of a family (`kernel_cache.FAMILIES`) are
    compiled. Without them the model stays as it is, and attends in plain torch. `kv_dtype` names codes in which K and V
    are kept, or is auto. Unless the model `fuses`, the fused stack is not tried: it knows neither tokens that see later
    ones, as images make them, nor other ranks. For one rank's part `agreed` says whether something is so on all ranks:
    they take the same ways, since they compute passes together, and no fused layers.
    """
    architecture = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    tokens = verify.tokens(config, device)
    family = kernel_cache.CODED if keeps_codes(model) else kernel_cache.DECODER
    waits = device.type == "cpu" and quantization == "none" and not has_kernels(model.dtype, family)
    if waits:
        _decode(model)
    count, size = _parameters(model)
    quantized = _quantize(model, architecture) if quantization == "int8" else {}
    packed: list[PanelLinear] = []

    def pack() -> None:
        with _decoding(model):
            packed.extend(pack_linears(model, lambda done, total: progress("pack weights", done, total), quantized))
        # The C library keeps what weights were on their way, and the self-check wants memory, too.
        trim_heap()

    # Passes with encoded weights would decode them again and again. Packing verifies each layer by itself.
    if not waits and _encoded(model):
        pack()
    try:
        with torch.inference_mode():
            if is_recurrent(config):
                refuse_time_step_limit(model)
                follow_time_step_limit(model)
            expected = verify.eager_logits(model, tokens)
            attention = probe_attention(model, tokens[:1])
            recurrent = probe_recurrent(model, tokens[:1]) if is_recurrent(config) else None
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        if isinstance(error, ModelRefused):
            raise
        reason = f"a forward pass over plain tokens fails: {first_line(error)}"
        raise ModelRefused(architecture, reason) from error
    if not verify.are_finite(expected) and (damaged := _not_finite(model)):
        raise ModelRefused(architecture, damaged)
    if recurrent is not None:
        replace_forwards(recurrent.mixers)
        # Stacks and fused layers compute attention alone.
        fuses = False
    loaded = LoadedModel(
        model=model,
        attention=attention,
        recurrent=recurrent,
        device=device,
        dtype=model.dtype,
        architecture=architecture,
        vocab_size=expected.shape[-1],
        max_position=max_position_of(config),
        eos_token_ids=_eos_token_ids(model),
        parameter_count=count,
        parameter_bytes=size,
        kernel_family=family,
    )
    if waits:
        plain = replace(loaded, attention_name="reference", has_kernels=False)
        verify.check_paged(plain, tokens, expected)
        return _with_kv(plain, kv_dtype, tokens)
    if device.type == "cpu":
        pack()
        size = _parameters(model)[1] + sum(linear.num_bytes for linear in dict.fromkeys(packed))
        loaded = replace(loaded, parameter_bytes=size, stack=fused_stack(loaded) if fuses else None)
    if device.type == "cuda":
        _replace_modules(loaded, tokens, expected, agreed)
        chosen = choose_attention(loaded, tokens, expected, agreed=agreed)
        return fuse_layers(chosen, tokens, expected) if agreed is None and recurrent is None else chosen
    if loaded.stack is not None:
        if not verify.stack_differs(loaded, tokens, expected):
            # More logits come, and these are much memory.
            del expected
            trim_heap()
            if not verify.far_stack_differs(loaded, tokens):
                trim_heap()
                invariant = kv_dtype == "auto" and verify.rows_are_invariant(loaded, tokens)
                return _with_kv(replace(loaded, row_invariant=invariant), kv_dtype, tokens)
            with torch.inference_mode():
                expected = verify.eager_logits(model, tokens)
        log.warning(
            "%s is not served by the fused stack but by transformers' modules, since the stack gives other logits",
            architecture,
        )
    modules = replace(loaded, stack=None)
    verify.check_paged(modules, tokens, expected)
    return _with_kv(modules, kv_dtype, tokens)


def _with_kv(loaded: LoadedModel, kv_dtype: str, tokens: torch.Tensor) -> LoadedModel:
    """Keep K and V in codes where `kv_dtype` names some, in the stack if that computes what plain torch does.

    Raises ModelRefused where codes change logits too much.
    """
    if kv_dtype == "auto":
        return loaded
    attention = loaded.attention
    try:
        coded = replace(loaded, attention=replace(attention, layout=attention.layout.as_codes(kv_dtype)))
    except ValueError as error:
        raise ModelRefused(loaded.architecture, str(error)) from None
    plain = replace(coded, stack=None, attention_name="reference")
    expected = verify.plain_logits(plain, tokens)
    change = verify.median_error(expected, verify.plain_logits(replace(plain, attention=attention), tokens))
    if not change <= _MOST_KV_CHANGE:
        raise ModelRefused(
            loaded.architecture, f"kv_dtype {kv_dtype} changes logits of random tokens by {change:.2g}: use auto"
        )
    level = logging.WARNING if change > _MUCH_KV_CHANGE else logging.INFO
    log.log(level, "K and V are kept in %s, which changes logits of random tokens by %.2g", kv_dtype, change)
    if loaded.stack is not None:
        if not verify.stack_differs(coded, tokens, expected):
            return replace(coded, row_invariant=verify.rows_are_invariant(coded, tokens))
        log.warning("the fused stack gives other logits with K and V in %s than plain torch", kv_dtype)
    if loaded.has_kernels:
        log.warning("%s attends in plain torch, which is slow: K and V are in %s", loaded.architecture, kv_dtype)
    return plain


def _replace_modules(
    loaded: LoadedModel,
    tokens: torch.Tensor,
    expected: torch.Tensor,
    agreed: Agreed | None = None,
) -> None:
    """Compute norms and gated layers by kernels, if the model gives the same logits. Refuses one that never does.

    In a group all ranks replace some, or none does: those that do may try another pass, which is one of all.
    """
    replaced = ReplacedModules(loaded.model)
    if agreed is not None and not agreed(bool(replaced)):
        replaced.undo()
    try:
        verify.check_paged(loaded, tokens, expected)
    except ModelRefused as error:
        if not replaced:
            raise
        replaced.undo()
        verify.check_paged(loaded, tokens, expected)
        log.warning("norms and gated layers are transformers' own, since kernels give other logits: %s", error.reason)


def _not_finite(model: PreTrainedModel) -> str:
    """Name the first weight that has values which are not finite; empty if there is none."""
    encoded = (
        (f"{name}.weight", module)
        for name, module in model.named_modules()
        if isinstance(module, EncodedLinear | EncodedEmbedding | CodedLinear | CodedEmbedding)
    )
    for name, owner in (*((name, None) for name, _ in model.named_parameters()), *encoded):
        weight = model.get_parameter(name) if owner is None else owner.weight
        wrong = int((~torch.isfinite(weight.float())).sum())
        if wrong:
            return (
                f"{wrong} of the {weight.numel()} values of {name} are not finite (NaN or infinite): download it anew"
            )
    return ""


def _parameters(model: PreTrainedModel) -> tuple[int, int]:
    """Count the parameters, and their bytes; encoded ones as they are computed with."""
    parameters = list(model.parameters())
    # A table may be the weight of the head, too.
    encoded = {module.source: module.dtype for module in _encoded(model)}
    counts = [math.prod(weight.shape) for weight in encoded]
    sizes = [count * dtype.itemsize for count, dtype in zip(counts, encoded.values(), strict=True)]
    # A byte of these may have two.
    grouped = (module for module in model.modules() if isinstance(module, GroupedLinear | GroupedExperts))
    more = [(one.coding.numbers - 1) * one.codes.numel() for one in grouped]
    return (
        sum(parameter.numel() for parameter in parameters) + sum(counts) + sum(more),
        sum(parameter.nbytes for parameter in parameters) + sum(sizes),
    )


def _encoded(model: PreTrainedModel) -> list[EncodedLinear | EncodedEmbedding]:
    """List the modules whose weights are encoded."""
    return [module for module in model.modules() if isinstance(module, EncodedLinear | EncodedEmbedding)]


@contextmanager
def _decoding(model: PreTrainedModel) -> Iterator[None]:
    """Refuse a model with an encoded weight that cannot be decoded, and name it."""
    try:
        yield
    except _DECODING_ERRORS as error:
        name = next((name for name, module in model.named_modules() if _is_broken(module)), None)
        if name is None:
            raise
        raise ModelRefused(type(model).__name__, f"the weight of {name} cannot be read: {first_line(error)}") from error


def _is_broken(module: nn.Module) -> bool:
    if not isinstance(module, EncodedLinear | EncodedEmbedding):
        return False
    try:
        module.source.decoded(module.dtype)
    except _DECODING_ERRORS:
        return True
    return False


def _decode(model: PreTrainedModel) -> None:
    """Make plain weights of encoded ones, for the time until kernels are compiled."""
    if _encoded(model):
        said = "%s: its weights are decoded to %s in memory, since kernels are still to be compiled"
        log.info(said, type(model).__name__, model.dtype)
        with _decoding(model):
            decode_all(model)


def _quantize(model: PreTrainedModel, architecture: str) -> dict[nn.Module, Quantized]:
    with _decoding(model):
        quantized = quantize_linears(model)
    if not quantized:
        raise ModelRefused(
            architecture, "it has no plain linear layer, and int8 quantizes only these; use quantization none"
        )
    return quantized


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the generation config's end tokens, which may be several; else the config's."""
    for config in (model.generation_config, model.config.get_text_config(decoder=True)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()
