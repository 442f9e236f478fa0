"""Loads a recogniser (Whisper), and verifies that its decoder gives the same logits on the paged KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from model_worker.attention import cuda
from model_worker.batch import ForwardBatch
from model_worker.cpu import kernel_cache
from model_worker.cpu.gemm.half_linear import are_halves, pack_halves
from model_worker.cpu.gemm.packed_linear import PACKED_DTYPES, pack_linears
from model_worker.decoder_form import UnsupportedPattern
from model_worker.hearing.compiled import compiled_layers, probed
from model_worker.hearing.encoder import ClipEncoder, clip_encoder
from model_worker.kv_cache import AttentionParams, KVLayout, LayerShape
from model_worker.loading import verify
from model_worker.model import BLOCK_SIZE, AttentionLayers, LoadedModel, ModelRefused, check_positions, first_line
from model_worker.runner import ModelRunner
from model_worker.vision.composite import encoder_dtype
from shared.recogniser_files import clip_tokens

log = logging.getLogger(__name__)

# Tokens of the transcripts in the self-check, and where the first one is cut.
_TOKENS = 8
_CUT = 5


def refuse_options(architecture: str, quantization: str, kv_dtype: str, has_overlays: bool) -> None:
    """Refuse what a recogniser cannot be served with."""
    if quantization != "none":
        raise ModelRefused(architecture, f"quantization {quantization} is not supported for speech: use none")
    if kv_dtype != "auto":
        raise ModelRefused(architecture, f"kv_dtype {kv_dtype} is not supported for speech: use auto")
    if has_overlays:
        raise ModelRefused(architecture, "its weights are not changed while it runs: restart the server with others")


def computed_dtype(wanted: torch.dtype | str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """Return the type to compute in: with auto that of the checkpoint, or float32 where half types are slow."""
    if isinstance(wanted, torch.dtype):
        return wanted
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    return encoder_dtype(torch.bfloat16 if stored == torch.float16 and device.type == "cpu" else stored, device)


def prepare_speech(
    model: PreTrainedModel,
    device: torch.device,
    max_model_len: int | None,
    has_kernels: Callable[[torch.dtype, str], bool],
) -> LoadedModel:
    """Make a recogniser ready for the paged cache, or refuse it. `max_model_len` counts the tokens of the clip, too."""
    config: Any = model.config
    architecture = type(model).__name__
    tokens = clip_tokens(config.max_source_positions)
    longest = tokens + int(config.max_target_positions)
    check_positions(max_model_len, longest)
    if max_model_len is not None and max_model_len <= tokens:
        raise ValueError(
            f"max_model_len must be above {tokens}, the tokens that stand for a clip of this model, got {max_model_len}"
        )
    loaded = LoadedModel(
        model=model,
        attention=_layers(model),
        device=device,
        dtype=model.dtype,
        architecture=architecture,
        vocab_size=int(config.vocab_size),
        max_position=longest,
        eos_token_ids=(int(config.eos_token_id),),
        parameter_count=sum(parameter.numel() for parameter in model.parameters()),
        parameter_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        kernel_family=kernel_cache.SPEECH_IN_HALVES if are_halves(_of_decoder(model)) else kernel_cache.SPEECH,
        encoder=clip_encoder(model, model.dtype, device),
        clip_tokens=tokens,
    )
    try:
        return _verified(loaded, has_kernels)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        if isinstance(error, ModelRefused):
            raise
        raise ModelRefused(
            architecture, f"its decoder cannot be run on the paged cache: {first_line(error)}"
        ) from error


def _layers(model: PreTrainedModel) -> AttentionLayers:
    config: Any = model.config
    width = config.d_model // config.decoder_attention_heads
    shape = LayerShape(config.decoder_attention_heads, width, width)
    decoder: Any = model.model.decoder
    layer_of: dict[nn.Module, int] = {layer.self_attn: index for index, layer in enumerate(decoder.layers)}
    params = tuple(AttentionParams(scale=1.0) for _ in layer_of)
    return AttentionLayers(layer_of, params, KVLayout((shape,) * len(layer_of), model.dtype))


def _verified(loaded: LoadedModel, has_kernels: Callable[[torch.dtype, str], bool]) -> LoadedModel:
    """Choose the attention by device, and check the model with it."""
    states, tokens, expected = _expected(loaded)
    if loaded.device.type == "cpu":
        if not has_kernels(loaded.dtype, kernel_cache.DECODER):
            loaded = replace(loaded, attention_name="reference", has_kernels=False)
        elif loaded.dtype in PACKED_DTYPES:
            # torch's own products of some rows take several times as long.
            loaded = _packed(loaded, has_kernels)
        _check(loaded, states, tokens, expected, "reference", BLOCK_SIZE)
        return loaded
    layers = loaded.attention
    reason = cuda.unsupported(layers.layout, layers.params, loaded.device)
    if loaded.device.type == "cuda" and reason is None:
        _check(loaded, states, tokens, expected, "cuda", cuda.BLOCK_SIZE)
        return replace(loaded, attention_name="cuda", block_size=cuda.BLOCK_SIZE)
    _check(loaded, states, tokens, expected, "reference", BLOCK_SIZE)
    return replace(loaded, attention_name="reference")


def _packed(loaded: LoadedModel, has_kernels: Callable[[torch.dtype, str], bool]) -> LoadedModel:
    """Pack the weights of all products, as far as their kernels are compiled."""
    model: Any = loaded.model
    size = loaded.parameter_bytes
    # Asked once: another process may compile some meanwhile.
    there = {part: has_kernels(loaded.dtype, part) for part in kernel_cache.parts_of(loaded.kernel_family)}
    if there.get(kernel_cache.HALVES):
        size -= pack_halves(model, _of_decoder(model))
    if pack_linears(model):
        # The table of embeddings stays beside the copy that multiplies.
        size += int(model.get_input_embeddings().weight.nbytes)
    encoder = _compiled(loaded) if there[kernel_cache.ENCODER] else loaded.encoder
    return replace(loaded, parameter_bytes=size, encoder=encoder, awaits_kernels=not all(there.values()))


def _of_decoder(model: Any) -> list[nn.Module]:
    """Return the linear modules of the decoder and its head, whose products wait for memory."""
    parts = [*model.model.decoder.modules(), model.proj_out]
    return [part for part in parts if isinstance(part, nn.Linear)]


def _compiled(loaded: LoadedModel) -> ClipEncoder:
    """Return the encoder with its layers in compiled calls, or as it is where they give other states."""
    assert isinstance(loaded.encoder, ClipEncoder)
    model: Any = loaded.model
    encoder = model.model.encoder
    try:
        layers = compiled_layers(encoder)
        error = verify.largest_error(*probed(encoder, layers))
    except UnsupportedPattern as reason:
        log.info("the encoder of %s is run by transformers' modules, since %s", loaded.architecture, reason)
        return loaded.encoder
    if not error < verify.TOLERANCE[loaded.dtype]:
        log.warning("compiled, the encoder of %s gives other states (relative error %.2g)", loaded.architecture, error)
        return loaded.encoder
    return replace(loaded.encoder, compiled=layers)


def _expected(loaded: LoadedModel) -> tuple[Tensor, Tensor, Tensor]:
    """Draw encoder states [2, n, hidden] and tokens [2, 8]; return them with the model's own logits."""
    config: Any = loaded.model.config
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, config.max_source_positions, config.d_model, generator=generator)
    tokens = torch.randint(0, config.vocab_size, (2, _TOKENS), generator=generator)
    given = states.to(loaded.device, loaded.dtype)
    model: Any = loaded.model
    with torch.inference_mode():
        output = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=given),
            decoder_input_ids=tokens.to(loaded.device),
            use_cache=False,
        )
    return states, tokens, output.logits


def _check(
    loaded: LoadedModel, states: Tensor, tokens: Tensor, expected: Tensor, attention: str, block_size: int
) -> None:
    """Compute two transcripts beside each other, one of them in pieces, and compare the logits with `expected`."""
    clip = loaded.clip_tokens
    blocks = -(-(clip + _TOKENS) // block_size)
    backend = ModelRunner(loaded, 2 * blocks, block_size, attention).backend
    tables = np.stack([np.arange(blocks)[::-1], blocks + np.arange(blocks)])
    padded = nn.functional.pad(states, (0, 0, 0, clip - states.shape[1])).numpy()

    def forward(ends: list[tuple[int, int, int]]) -> Tensor:
        """Compute of each sequence (number, first, end) these tokens; return the logits of all."""
        known = [np.concatenate([np.zeros(clip, np.int64), row.numpy()]) for row in tokens]
        parts = [known[row][first:end] for row, first, end in ends]
        offsets = np.cumsum([0, *map(len, parts)])
        clips = [np.arange(first, min(end, clip)) for _, first, end in ends]
        where = [offsets[i] + each - ends[i][1] for i, each in enumerate(clips)]
        given = [padded[row][each] for (row, _, _), each in zip(ends, clips, strict=True)]
        batch = ForwardBatch.build(
            np.concatenate(parts),
            np.array([len(part) for part in parts]),
            np.array([end for _, _, end in ends]),
            tables[[row for row, _, _ in ends]],
            block_size,
            np.arange(offsets[-1]),
            loaded.device,
            embeddings=(np.concatenate(where).astype(np.int64), np.concatenate(given).astype(np.float32)),
        )
        return backend.logits(batch)

    half = clip // 2
    forward([(0, 0, half)])
    first = forward([(0, half, clip + _CUT), (1, 0, clip + _TOKENS)])
    cut = clip - half + _CUT
    rest = forward([(0, clip + _CUT, clip + _TOKENS)])
    got = torch.cat([first[clip - half : cut], rest, first[cut + clip :]])
    error = verify.median_error(got, expected.flatten(0, 1))
    if not error < verify.TOLERANCE[loaded.dtype]:
        raise ModelRefused(
            loaded.architecture,
            f"on the paged KV cache it gives other logits than by its own attention (relative error {error:.2g})",
        )
