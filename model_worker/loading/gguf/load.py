"""Makes transformers' model of a GGUF file: the config from its metadata, the weights tensor by tensor.

Weights of linear layers, and tables of embeddings, stay in the file's blocks where panels will be made of them
(encoded_linear.py, embedding.py); others are decoded into plain tensors.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from model_worker.attention import PAGED_ATTENTION
from model_worker.cpu.gemm.embedding import has_table, keep_encoded
from model_worker.cpu.gemm.encoded_linear import EncodedLinear, EncodedWeight
from model_worker.cpu.gemm.expert_linears import keep_experts
from model_worker.loading.gguf.names import NO_WEIGHTS, ROTARY_FACTORS, source_of
from model_worker.loading.gguf.weights import GgufWeight, Vector, read_weight
from model_worker.loading.gpu_kinds import Kind
from model_worker.loading.gpu_weights import kept_on_gpu, place_on_gpu
from model_worker.loading.placeholder import Placeholder
from model_worker.loading.weights import LOAD_ERRORS, check_loaded
from model_worker.model import ModelRefused, first_line
from shared.gguf.config import config_of
from shared.gguf.file import GgufFile
from shared.gguf.format import GgufError, damaged

log = logging.getLogger(__name__)

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head"


def gguf_config(file: GgufFile) -> PreTrainedConfig:
    """Return transformers' config. GgufError or ModelRefused says why there is none."""
    values = config_of(file)
    file.forget_tokens()
    kind = values.pop("model_type")
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[kind](**values)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelRefused(values["architectures"][0], f"{file.path}: {first_line(error)}") from error
    return config


def load_gguf(
    file: GgufFile, config: PreTrainedConfig, architecture: str, dtype: torch.dtype | str, device: torch.device
) -> PreTrainedModel:
    """Load the model. GgufError or ModelRefused says what is wrong with its weights."""
    kind = _dtype(file, dtype, device)
    lazily = device.type == "cpu"
    try:
        with torch.device("meta"):
            skeleton: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except LOAD_ERRORS as error:
        raise ModelRefused(architecture, f"{file.path}: {first_line(error)}") from error
    weights = _weights(file, skeleton)
    encoded = {
        name: weight
        for name, weight in weights.items()
        if isinstance(weight, GgufWeight) and _may_stay(skeleton, name, tables=lazily)
    }
    experts = {name: weight for name, weight in weights.items() if isinstance(weight, EncodedWeight) and weight.experts}
    places = {name.removesuffix(".weight"): weight for name, weight in {**encoded, **experts}.items()}
    kinds: dict[str, Kind] = {}
    if not lazily:
        kinds = kept_on_gpu(places, skeleton, device, architecture, kind, rounds_inputs=False)
        encoded = {name: weight for name, weight in encoded.items() if name.removesuffix(".weight") in kinds}
        experts = {name: weight for name, weight in experts.items() if name in kinds}
    state: dict[str, Any] = {
        name: Placeholder(weight.shape, kind) if name in encoded or name in experts else _Decoded(weight, kind)
        for name, weight in weights.items()
    }
    try:
        # Typed for one return value, and there are two with loading info.
        model_class: Any = type(skeleton)
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=kind,
            attn_implementation=PAGED_ATTENTION,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except LOAD_ERRORS as error:
        if isinstance(error, ModelRefused | GgufError):
            raise
        raise ModelRefused(architecture, f"{file.path}: {first_line(error)}") from error
    check_loaded(architecture, info)
    if lazily:
        _keep(model, config, encoded, experts, kind)
    else:
        place_on_gpu(model, places, kinds)
    _scale_rotation(file, model)
    _say(file, architecture, kind, lazily, len(kinds))
    loaded: PreTrainedModel = model
    return loaded


def _keep(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    encoded: Mapping[str, EncodedWeight],
    experts: Mapping[str, EncodedWeight],
    kind: torch.dtype,
) -> None:
    """Leave weights encoded until panels are made of them."""
    for name, weight in encoded.items():
        keep_encoded(model, name.removesuffix(".weight"), weight, kind)
    for name, weight in experts.items():
        keep_experts(model, name, weight, kind)
    if config.tie_word_embeddings and _EMBEDDING in encoded:
        model.set_submodule(_HEAD, EncodedLinear(encoded[_EMBEDDING], None, kind))


@dataclass(frozen=True, eq=False)
class _Decoded:
    """A weight that transformers decodes by indexing it, as it reads a tensor of a file."""

    weight: EncodedWeight | Vector
    dtype: torch.dtype

    def __getitem__(self, _: Any) -> Tensor:
        return self.weight.decoded(self.dtype)


def _weights(file: GgufFile, skeleton: PreTrainedModel) -> dict[str, EncodedWeight | Vector]:
    """Return the model's weights by name. GgufError for one that is missing, and for a tensor without a place."""
    config = skeleton.config
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    tied = set(getattr(skeleton, "all_tied_weights_keys", None) or ())
    left = set(file.tensors) - NO_WEIGHTS
    if ROTARY_FACTORS in file.tensors and not hasattr(skeleton.get_decoder().rotary_emb, "inv_freq"):
        # Models with several rotations, which these factors do not tell apart.
        left.add(ROTARY_FACTORS)
    found: dict[str, EncodedWeight | Vector] = {}
    for name, parameter in skeleton.state_dict().items():
        if name in tied:
            continue
        source = source_of(file.architecture, name)
        if source is None:
            raise damaged(file.path, f"no tensor stands for {name} of {type(skeleton).__name__}")
        found[name] = read_weight(file, source, tuple(parameter.shape), heads, kv_heads)
        left.difference_update(source.names)
    if left:
        raise GgufError(
            f"{file.path}: {type(skeleton).__name__} has no place for {len(left)} of its tensors, such as "
            f"{min(left)}, so it is another kind of model than general.architecture {file.architecture!r} says; "
            "use the model's Hugging Face directory"
        )
    return found


def _may_stay(skeleton: PreTrainedModel, name: str, tables: bool) -> bool:
    """Whether a weight may stay encoded: that of a linear layer, or with `tables` that of an embedding."""
    path, _, last = name.rpartition(".")
    module = skeleton.get_submodule(path)
    return last == "weight" and (type(module) is nn.Linear or (tables and has_table(module)))


def _dtype(file: GgufFile, dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    """Return the type to compute in: what is asked for; float32 for a file of float32, else half precision."""
    if isinstance(dtype, torch.dtype):
        return dtype
    stored = file.tensor("token_embd.weight").kind.name
    if stored == "F32" and all(tensor.kind.name == "F32" for tensor in file.tensors.values()):
        return torch.float32
    return torch.float16 if stored == "F16" and device.type != "cpu" else torch.bfloat16


def _scale_rotation(file: GgufFile, model: PreTrainedModel) -> None:
    """Divide the frequencies of the rotation by the file's factors, if it has some."""
    if ROTARY_FACTORS not in file.tensors:
        return
    factors = torch.from_numpy(file.tensor(ROTARY_FACTORS).values())
    rotary: Any = model.get_decoder().rotary_emb
    for name in ("inv_freq", "original_inv_freq"):
        frequencies = getattr(rotary, name)
        if factors.shape != frequencies.shape or not bool((factors > 0).all()):
            raise damaged(
                file.path, f"tensor {ROTARY_FACTORS} is {list(factors.shape)}, not {list(frequencies.shape)} above 0"
            )
        setattr(rotary, name, frequencies / factors)


def _say(file: GgufFile, architecture: str, kind: torch.dtype, lazily: bool, kept: int) -> None:
    kinds = Counter(tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1)
    counted = ", ".join(f"{count} {name}" for name, count in kinds.most_common())
    log.info(
        "%s: matrices of the GGUF file (%s) are %s",
        architecture,
        counted,
        "kept in their bits where panels hold them, else decoded one at a time"
        if lazily
        else f"decoded to {kind} in memory, but for {kept}",
    )
