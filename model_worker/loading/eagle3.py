"""Loads EAGLE-3 heads in the published formats: SafeAILab's, which SGLang and vLLM read, too, and speculators'.

Which weights a head has is seen by their names. What the config adds are the numbers of its layer, the layers of the
served model that it reads, and the order of norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from model_worker.attention import cpu
from model_worker.cpu import kernel_cache
from model_worker.cpu.gemm.packed_linear import pack_linears
from model_worker.drafters.eagle3_head import Eagle3Head, HeadForm, check_layers, default_layers
from model_worker.loading.stored import Stored, open_stored
from model_worker.model import LoadedModel, first_line
from shared.load_errors import missing_weights
from shared.tokenizer_files import file_of, read_json

_MARK = "eagle3"
_ALGORITHM = "speculators_model_type"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_ATTENTION = "layers.0.self_attn."
# Tensors that say nothing that is needed here: which of the served model's tokens the head can guess (`d2t` says it,
# too), and copies of the served model's own.
_NOT_NEEDED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
# Fields of transformers' config that say nothing of the layer, and that it would check.
_NO_FIELDS = ("architectures", "auto_map", "torch_dtype", "dtype", "quantization_config", "transformers_version")


class HeadRefused(ValueError):
    """A head that cannot guess for the served model."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"draft: the EAGLE-3 head {source} cannot be used: {reason}")


@contextmanager
def refused_by_name(source: str) -> Iterator[None]:
    """Make HeadRefused of what goes wrong with the head's numbers or its config."""
    try:
        yield
    except (ValueError, TypeError, LookupError, OSError, RuntimeError, ArithmeticError, AttributeError) as error:
        raise HeadRefused(source, first_line(error)) from error


def is_head(source: str) -> bool:
    """Whether a directory or hub name is an EAGLE-3 head, or another of its kind, by its config."""
    try:
        config = read_json(source, "config.json")
    except OSError:
        # It is no folder, and no name on the hub. Loading it as a model will say so.
        return False
    names = config.get("architectures")
    named = any(_MARK in str(name).lower() for name in names) if isinstance(names, list) else False
    # The first published heads say that they are Llama models.
    return named or any(field in config for field in (_ALGORITHM, "eagle_config", "draft_vocab_size"))


def load_head(
    source: str,
    loaded: LoadedModel,
    has_kernels: Callable[[torch.dtype, str], bool] = lambda *_: True,
) -> Eagle3Head:
    """Load the head of a directory or hub name that guesses for the model `loaded`. HeadRefused says why it cannot.

    It computes in the served model's type.
    """
    fields = read_json(source, "config.json")
    with refused_by_name(source):
        stored = {_renamed(name): tensor for name, tensor in open_stored(source).tensors.items()}
        if not stored:
            folder = file_of(source, "config.json")
            raise ValueError("it has no weights" if folder is None else missing_weights(folder.parent))
        head = _make(fields, stored, loaded)
        _fill(head, stored)
    head.requires_grad_(False).eval()
    head.to(loaded.dtype)
    if has_kernels(loaded.dtype, kernel_cache.DECODER):
        pack_linears(head)
        head.attend = cpu.attend
    return head


def _renamed(name: str) -> str:
    """Return a tensor's name as `Eagle3Head` has it."""
    short = name.removeprefix("model.")
    return "layers.0." + short.removeprefix("midlayer.") if short.startswith("midlayer.") else short


def _make(fields: Mapping[str, Any], stored: Mapping[str, Stored], loaded: LoadedModel) -> Eagle3Head:
    """Make the head's modules without its numbers."""
    algorithm = fields.get(_ALGORITHM, _MARK)
    if algorithm != _MARK:
        raise ValueError(f"config.json has {_ALGORITHM} {algorithm!r}, and only {_MARK!r} is supported")
    layer = fields.get("transformer_layer_config", fields)
    if not isinstance(layer, dict):
        raise ValueError(f"config.json has transformer_layer_config {layer!r:.100}, which is no object")
    config = _layer_config(layer)
    reads = _layers(fields, loaded)
    for name in ("fc.weight", "d2t"):
        if name not in stored and (name == "fc.weight" or "t2d" in stored):
            raise ValueError(f"it has no tensor {name}: download it anew")
    hidden = config.hidden_size
    outputs, inputs = _matrix(stored, "fc.weight")
    if outputs != hidden or inputs != len(reads) * loaded.hidden_size:
        raise ValueError(
            f"its fc.weight is {outputs} x {inputs}, where residuals of {len(reads)} layers of the served model, each "
            f"{loaded.hidden_size} wide, and hidden_size {hidden} want {hidden} x {len(reads) * loaded.hidden_size}: "
            "name a head that was made for this model"
        )
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name not in stored and hidden != loaded.hidden_size:
            raise ValueError(f"it has no {name}, and the served model's is {loaded.hidden_size} wide, not {hidden}")
    own_lm_head = "lm_head.weight" in stored
    draft_vocab = _matrix(stored, "lm_head.weight")[0] if own_lm_head else loaded.vocab_size
    form = HeadForm(
        layers=reads,
        target_hidden=loaded.hidden_size,
        draft_vocab=draft_vocab,
        vocab=loaded.vocab_size,
        own_embedding="embed_tokens.weight" in stored,
        own_lm_head=own_lm_head,
        norms_features="fc_norm.0.weight" in stored,
        norms_joined="input_norm.weight" in stored,
        # Speculators' heads do so unless they say something else.
        norm_before_residual=bool(fields.get("norm_before_residual", _ALGORITHM in fields)),
        norm_output=bool(fields.get("norm_output", False)),
        fc_bias="fc.bias" in stored,
        qkv_bias=f"{_ATTENTION}q_proj.bias" in stored,
        o_bias=f"{_ATTENTION}o_proj.bias" in stored,
    )
    with torch.device("meta"):
        head = Eagle3Head(config, form)
    # What is computed from the config has numbers.
    head.rotary = type(head.rotary)(config)
    head.targets = _targets(stored, draft_vocab, loaded.vocab_size)
    return head


def _layer_config(fields: Mapping[str, Any]) -> LlamaConfig:
    kept = {name: value for name, value in fields.items() if name not in _NO_FIELDS}
    rope = kept.get("rope_scaling")
    if isinstance(rope, dict) and "mrope_section" in rope:
        # Text has the same position in all directions.
        kept["rope_scaling"] = None
    if not isinstance(kept.get("hidden_size"), int):
        raise ValueError("config.json has no hidden_size")
    dim = kept.get("head_dim")
    if isinstance(dim, int) and dim % 2:
        raise ValueError(f"config.json has head_dim {dim}, and positions want an even one")
    config = LlamaConfig(**kept)
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads or heads
    if heads % kv_heads:
        raise ValueError(
            f"config.json has num_attention_heads {heads}, and num_key_value_heads {kv_heads} does not divide it"
        )
    return config


def _matrix(stored: Mapping[str, Stored], name: str) -> tuple[int, int]:
    """Return the shape of a tensor of two dimensions."""
    shape = stored[name].shape
    if len(shape) != 2:
        raise ValueError(f"its {name} has the shape {shape}, and should have two dimensions: download it anew")
    return shape[0], shape[1]


def _layers(fields: Mapping[str, Any], loaded: LoadedModel) -> tuple[int, ...]:
    """Return the layers whose residuals are read, as they enter."""
    count = len(loaded.attention.layout.layers)
    nested = fields.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    if nested.get("use_aux_hidden_state") is False:
        raise ValueError("its config says use_aux_hidden_state false: only heads of EAGLE-3 are supported, not older")
    # In the config of speculators a layer's number means what enters it, in SGLang's what leaves it.
    found = fields.get(_LAYER_IDS) or [layer + 1 for layer in nested.get(_LAYER_IDS) or ()]
    layers = tuple(int(layer) for layer in found) or default_layers(count)
    if problem := check_layers(layers, count):
        raise ValueError(f"{problem} layers: name a head that was made for this model")
    return layers


def _targets(stored: Mapping[str, Stored], draft_vocab: int, vocab: int) -> Tensor:
    """Return the tokens of the served model that the head's own tokens are."""
    own = torch.arange(draft_vocab)
    if "d2t" in stored:
        shifts = stored["d2t"].read()
        if tuple(shifts.shape) != (draft_vocab,):
            raise ValueError(f"its d2t has the shape {tuple(shifts.shape)}, and its lm_head {draft_vocab} tokens")
        own = own + shifts.to(torch.int64)
    if draft_vocab and (int(own.min()) < 0 or int(own.max()) >= vocab):
        raise ValueError(
            f"it guesses tokens from {int(own.min())} to {int(own.max())}, and the served model has {vocab}: name a "
            "head that was made for this model"
        )
    return own


def _fill(head: Eagle3Head, stored: Mapping[str, Stored]) -> None:
    """Read the head's numbers. ValueError names a tensor that is missing, or has no place."""
    places = head.state_dict()
    missing = [name for name in places if name not in stored]
    if missing:
        raise ValueError(f"it has no tensor {missing[0]}: download it anew")
    others = [name for name in stored if name not in places and name not in (*_NOT_NEEDED, "d2t")]
    if others:
        raise ValueError(f"it has a tensor {others[0]}, which heads of one layer like Llama's have not")
    numbers = {}
    for name, place in places.items():
        tensor = stored[name]
        if tensor.shape != tuple(place.shape):
            raise ValueError(f"its {name} has the shape {tensor.shape}, and its config wants {tuple(place.shape)}")
        numbers[name] = tensor.read()
        if not numbers[name].is_floating_point():
            raise ValueError(f"its {name} is {tensor.dtype}: quantized heads are not supported, name a plain one")
        if not bool(torch.isfinite(numbers[name].float()).all()):
            raise ValueError(f"its {name} has values that are not finite: download it anew")
    head.load_state_dict(numbers, assign=True)
