"""Loads a checkpoint for a one-shot task and proves that it computes what transformers does, or refuses it.

Knows the steps. Does not know who asks for the values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from model_worker.cpu.encoder.joined import separate_joined
from model_worker.cpu.encoder.pattern import OWN_SCALES
from model_worker.cpu.gemm.packed_linear import PACKED_DTYPES, PackedLinear, pack_linears, quantize_linears
from model_worker.cpu.gemm.weight_format import PANEL
from model_worker.decoder_form import UnsupportedPattern
from model_worker.loading.checkpoint import (
    check_device,
    check_quantization,
    read_config,
    weights_dtype,
)
from model_worker.loading.quantized.read import is_quantized
from model_worker.loading.recurrent import follow_time_step_limit
from model_worker.loading.rope import pin_rope
from model_worker.loading.weights import open_checkpoint, reported_weights
from model_worker.model import ModelRefused, Progress, check_positions, first_line
from model_worker.pooling import verify
from model_worker.pooling.adapters import PoolingAdapters, module_names
from model_worker.pooling.attention import PACKED_ATTENTION
from model_worker.pooling.backbone import Backbone, Packed, Padded
from model_worker.pooling.choose_head import head_of, labels_of, static_heads
from model_worker.pooling.fused import Fused, fused
from model_worker.pooling.heads import LabelHead, ScoreHead, SparseHead, TokenLabelHead
from model_worker.pooling.judge import Judge
from model_worker.pooling.loaded import Loaded
from model_worker.pooling.pooler import Pooler
from model_worker.pooling.smoothing import scale_inputs, smooth
from model_worker.pooling.texts import Texts
from model_worker.vision.composite import decoder_of
from model_worker.vision.family import is_composite
from shared.listening import LISTENING_TYPES
from shared.load_errors import broken_file
from shared.pooling_files import PoolingFiles, task_of

log = logging.getLogger(__name__)

# Tokens of one forward pass. On a CPU more of them lose time: their states do not fit its caches any more.
CPU_BATCH_TOKENS = 4096
GPU_BATCH_TOKENS = 16384
# Longest text of a model that sets no limit itself.
LONGEST_TEXT = 32768

# The class of transformers with the head of each task.
_CLASSES: dict[str, Any] = {
    "embed": AutoModel,
    "embed_tokens": AutoModel,
    "sparse": AutoModelForMaskedLM,
    "rerank": AutoModelForSequenceClassification,
    "classify": AutoModelForSequenceClassification,
    "classify_tokens": AutoModelForTokenClassification,
}


def load_pooling(
    source: str | Path,
    dtype: str = "auto",
    device: str = "cpu",
    task: str = "auto",
    quantization: str = "none",
    max_model_len: int | None = None,
    max_batch_tokens: int | None = None,
    progress: Progress = lambda _what, _done, _total: None,
    has_kernels: Callable[[torch.dtype], bool] = lambda _: True,
) -> Pooler:
    """Load a Hugging Face directory or hub name for a task. ValueError says why it cannot be served.

    `task` is one of shared.pooling_files.TASKS but generate; auto is what the checkpoint was made for, and a model that
    generates embeds. `dtype` auto is float32 on a CPU, except for a bfloat16 checkpoint where the processor multiplies
    that type; elsewhere it is the checkpoint's. `max_batch_tokens` are what one forward pass takes.
    `has_kernels` says for the weights' type whether a CPU's kernels of encoders are compiled. A model that has to do
    without them runs on transformers' layers, and says so; int8 weights need them, and compile them here.
    """
    target = torch.device(device)
    check_quantization(quantization, target)
    check_device(target)
    files = PoolingFiles.read(source)
    config = read_config(Path(source) / files.transformer_path if files.transformer_path else source)
    wanted = _task(files, task)
    # Some types name their positions otherwise (GPT-2: n_positions), and only the config's class knows.
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    limit = min((known for known in (files.max_tokens, positions) if known and known > 0), default=LONGEST_TEXT)
    check_positions(max_model_len, limit)
    length = min(limit, max_model_len or limit)
    _check_expansion(files, length, limit)
    with reported_weights(progress):
        model = _load(files, config, wanted, _dtype(dtype, config, target))
    config = model.config
    nn.Module.to(model, target)
    if target.type == "cpu":
        separate_joined(model.base_model)
    pin_rope(model, length)
    follow_time_step_limit(model)
    embeddings: Any = model.get_input_embeddings()
    loaded = Loaded(
        files=files,
        config=config,
        task=wanted,
        model=model.eval(),
        base=model.base_model,
        vocab_size=int(embeddings.weight.shape[0]),
        device=target,
        max_model_len=length,
        has_kernels=quantization != "none" or has_kernels(model.dtype),
    )
    budget = max_batch_tokens or (CPU_BATCH_TOKENS if target.type == "cpu" else GPU_BATCH_TOKENS)
    if target.type == "cpu":
        progress("compile kernels", 0, 1)
    with torch.inference_mode():
        return _made(loaded, quantization, budget)


def _made(loaded: Loaded, quantization: str, budget: int) -> Pooler:
    """Find the backbone and the head, and prove both."""
    model = loaded.model
    architecture = type(model).__name__
    is_base = loaded.base is model
    texts = verify.probe_texts(loaded.config, loaded.vocab_size, loaded.max_model_len, loaded.device)
    typical = _framed(loaded, texts)
    pooler = getattr(model, "pooler", None) if is_base else None
    if pooler is not None:
        # BERT's pooler reads the hidden states and changes none of them.
        setattr(model, "pooler", None)  # noqa: B010 (torch types attributes as modules)
    try:
        exact = _quantize(loaded, typical) if quantization == "int8" else None
        if exact is None and _onednn_packs(loaded):
            pack_linears(loaded.base)
        states = verify.expected_states(loaded.base, texts)
        logits = [] if is_base else verify.expected_logits(model, texts)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        if isinstance(error, ModelRefused):
            raise
        raise ModelRefused(architecture, f"a forward pass over plain tokens fails: {first_line(error)}") from error
    head = head_of(loaded, states.shape[1])
    judge = None if exact is None else Judge(head, typical, exact, loaded.vocab_size)
    if judge is not None and (reason := judge(verify.expected_states(loaded.base, typical))) is not None:
        raise ModelRefused(architecture, f"quantization int8 {reason}: use quantization none")
    backbone = _backbone(loaded, texts, states, judge)
    columns = logits[0].shape[-1] if logits else 1
    if loaded.task == "rerank" and isinstance(head, LabelHead) and columns != 1:
        raise ModelRefused(
            architecture, f"task rerank: it gives {columns} values for a pair, and a reranker one; use task classify"
        )
    if isinstance(head, LabelHead | TokenLabelHead | SparseHead | ScoreHead):
        reason = verify.logits_differ(head.head, states, texts, logits, last=getattr(head, "last", False))
        if reason is not None:
            raise ModelRefused(architecture, reason)
    base: Any = loaded.base
    adapted = _of_modules(loaded, texts, states) if isinstance(backbone, Fused) else backbone
    names = module_names(model, base, pooler)
    return Pooler(
        architecture=architecture,
        device=loaded.device,
        weights=model.dtype,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        max_batch_tokens=budget,
        labels=labels_of(loaded),
        quantization=quantization,
        backbone=backbone,
        head=head,
        static=static_heads(loaded),
        adapters=None if adapted is None else PoolingAdapters(base, names, adapted),
        waits_for_kernels=loaded.waits_for_kernels,
    )


def _framed(loaded: Loaded, texts: Texts) -> Texts:
    """Return the texts as clients send them. Where a text begins and ends, states are the largest."""
    framed = verify.framed(texts, *loaded.files.frame_tokens)
    return texts if max(framed.lengths) > loaded.max_model_len else framed


def _check_expansion(files: PoolingFiles, length: int, limit: int) -> None:
    """Raise ValueError if queries are expanded to more tokens than a text may have."""
    rules = files.late_interaction
    if rules is None or rules.expansion is None or rules.expansion.length <= length:
        return
    tokens = rules.expansion.length
    if tokens <= limit:
        raise ValueError(f"max_model_len must be at least {tokens}, the tokens of this model's queries, got {length}")
    raise ValueError(
        f"query_expansion of {files.source} makes queries {tokens} tokens long, and the model takes {length}: lower "
        "the length in its files"
    )


def _task(files: PoolingFiles, task: str) -> str:
    if task == "generate":
        raise ValueError("task 'generate' is not one that pools: use embed, rerank or another, or serve the model")
    found = files.task if task == "auto" else task_of(files.source, task)
    return "embed" if found == "generate" else found


def _dtype(dtype: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype | str:
    if dtype != "auto" or device.type != "cpu":
        return weights_dtype(dtype, device)
    stored = getattr(config, "dtype", None)
    return torch.bfloat16 if stored is torch.bfloat16 and multiplies_bfloat16() else torch.float32


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions that multiply bfloat16. Others take 4 times as long as for float32."""
    cpu: Any = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def _load(files: PoolingFiles, config: PreTrainedConfig, task: str, dtype: torch.dtype | str) -> PreTrainedModel:
    architecture = str((config.architectures or [config.model_type])[0])
    auto: Any = _CLASSES[task]
    composite = auto is AutoModel and is_composite(config) and config.model_type not in LISTENING_TYPES
    if composite:
        auto = AutoModelForImageTextToText
    if task in ("rerank", "classify") and files.score_modules:
        auto = AutoModel
    elif task == "rerank" and (files.of_kind("LogitScore") or not architecture.endswith("ForSequenceClassification")):
        auto = AutoModelForCausalLM
    if config.is_encoder_decoder:
        if auto is not AutoModel:
            raise ModelRefused(architecture, f"task {task}: it is an encoder-decoder, and only its encoder embeds")
        auto = AutoModelForTextEncoding
    checkpoint, scheme = open_checkpoint(files.source, config, architecture, files.transformer_path)
    if is_quantized(checkpoint, scheme):
        raise ModelRefused(
            architecture,
            f"task {task}: its weights are quantized ({scheme.method or 'as the names of its tensors show'}), and such "
            "ones are read for generation only; serve the unquantized model, with --quantization int8 if you like",
        )
    try:
        model, info = auto.from_pretrained(
            files.source,
            config=config,
            subfolder=files.transformer_path,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ModelRefused(architecture, broken_file(files.source) or first_line(error)) from error
    if composite:
        # Texts go through its text model alone.
        model = decoder_of(model)
    base = model.base_model is model
    missing = sorted(key for key in info["missing_keys"] if not (base and key.startswith("pooler.")))
    if missing:
        raise ModelRefused(
            architecture,
            f"task {task}: the checkpoint lacks {len(missing)} of its weights, such as {missing[0]}",
        )
    loaded: PreTrainedModel = model
    return loaded


def _quantize(loaded: Loaded, typical: Texts) -> Tensor:
    """Make linear layers int8. Returns the states of typical texts before."""
    base = loaded.base
    exact = verify.expected_states(base, typical)
    scales: dict[str, Tensor] = {}
    if loaded.model.dtype == torch.float32:
        limits = loaded.vocab_size, loaded.max_model_len, loaded.device
        many = _framed(loaded, verify.probe_texts(loaded.config, *limits, verify.SMOOTHED_LENGTHS))
        scales = smooth(base, lambda: verify.expected_states(base, many), OWN_SCALES)
    pack_linears(base, quantized=quantize_linears(base))
    scale_inputs(base, scales)
    return exact


def _onednn_packs(loaded: Loaded) -> bool:
    """Whether oneDNN reads packed weights of this type here, which saves a third of a short text's time.

    Where it does not, packed weights are for decode: few rows at once.
    """
    if loaded.device.type != "cpu" or loaded.model.dtype not in PACKED_DTYPES:
        return False
    sample = torch.randn(PANEL, PANEL, generator=torch.Generator().manual_seed(0)).to(loaded.model.dtype)
    return PackedLinear(sample, None).packed is not None


def _backbone(loaded: Loaded, texts: Texts, expected: Tensor, judge: Judge | None) -> Backbone:
    """Return the first way to run the model that gives the expected states.

    There is a `judge` for int8 weights. Fused layers with such weights round activations, too, and need only be close.
    """
    architecture = type(loaded.model).__name__
    reasons: list[str] = []
    fastest: Backbone | None = None
    for backbone in _backbones(loaded):
        fastest = fastest or backbone
        if judge is not None and isinstance(backbone, Fused):
            reason = verify.coarse_states_differ(backbone, texts, expected, judge)
        else:
            reason = verify.states_differ(backbone, texts, expected)
        if reason is None:
            if reasons and not isinstance(backbone, Fused) and isinstance(fastest, Fused):
                log.warning("%s runs on transformers' layers, since fused ones differ: %s", architecture, reasons[0])
            if isinstance(backbone, Padded):
                log.info("%s runs in padded groups: %s", architecture, reasons[0] if reasons else "as it must")
            return backbone
        reasons.append(reason)
    raise ModelRefused(architecture, f"neither packed nor padded texts give its own states: {reasons[-1]}")


def _backbones(loaded: Loaded) -> Iterator[Backbone]:
    """Set up one way to run the model after another."""
    if loaded.device.type == "cpu" and loaded.has_kernels:
        try:
            yield from fused(loaded.base, _padding(loaded))
        except UnsupportedPattern as reason:
            log.info("%s runs on transformers' layers, since %s", type(loaded.model).__name__, reason)
    yield from _module_backbones(loaded)


def _of_modules(loaded: Loaded, texts: Texts, expected: Tensor) -> Backbone | None:
    """Return the first way to run transformers' own layers that gives the expected states; None if none does."""
    found = (one for one in _module_backbones(loaded) if verify.states_differ(one, texts, expected) is None)
    return next(found, None)


def _module_backbones(loaded: Loaded) -> Iterator[Packed | Padded]:
    """Set up one way to run transformers' own layers after another."""
    model: Any = loaded.base
    padding = _padding(loaded)
    own = model.config._attn_implementation
    if model._can_set_attn_implementation() and _takes_positions(model):
        model.set_attn_implementation(PACKED_ATTENTION)
        yield Packed(model, 0)
        # RoBERTa and its kin count from behind the padding token's id.
        yield Packed(model, padding + 1)
        model.set_attn_implementation(own)
    yield Padded(model, padding)


def _padding(loaded: Loaded) -> int:
    return getattr(loaded.config, "pad_token_id", None) or 0


def _takes_positions(model: nn.Module) -> bool:
    import inspect

    return "position_ids" in inspect.signature(model.forward).parameters
