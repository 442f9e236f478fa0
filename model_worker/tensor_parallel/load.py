"""Loads one rank's part of a model: weights that are split are read in part, and the others whole.

Experts that a checkpoint has one by one are read whole and then cut. Knows checkpoints and plans. Does not know the
other ranks' processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from model_worker.agreement import Agreed
from model_worker.attention import PAGED_ATTENTION
from model_worker.hearing.encoder import hears
from model_worker.loading.checkpoint import read_config, refuse_by_config, weights_dtype
from model_worker.loading.prepare import prepare
from model_worker.loading.quantized.read import is_quantized, read_weights
from model_worker.loading.rope import pin_rope
from model_worker.loading.stored import Stored
from model_worker.loading.weight_names import WeightNames
from model_worker.loading.weights import (
    LOAD_ERRORS,
    check_loaded,
    computing_dtype,
    open_checkpoint,
    refuse_type,
    reported_weights,
)
from model_worker.model import LoadedModel, ModelRefused, Progress, check_positions, first_line, max_position_of
from model_worker.recurrent.families import is_recurrent
from model_worker.tensor_parallel.plan import SplitPlan, split_plan
from model_worker.tensor_parallel.shard import Joining, ReadPart, cut_model, join_parts, part_of
from model_worker.vision.family import is_composite
from shared.gguf.format import is_gguf
from shared.speech_tokens import SpeechTokenFiles

_CPU = torch.device("cpu")


def load_part(
    source: str | Path,
    dtype: str,
    ranks: int,
    joining: Joining,
    progress: Progress,
    max_model_len: int | None = None,
    device: torch.device = _CPU,
    agreed: Agreed | None = None,
) -> LoadedModel:
    """Load one rank's part of a model, and verify it. All ranks must call it, since they compute together.

    The model and its arguments are those of `load_model`. `agreed` says whether something is so on all ranks; `joining`
    does where it is left out. ModelRefused says what cannot be split.
    """
    wanted = weights_dtype(dtype, device)
    config = _splittable_config(source, ranks)
    architecture = refuse_by_config(config)
    max_position = max_position_of(config)
    check_positions(max_model_len, max_position)
    with reported_weights(progress):
        model, plan, sizes = _load(source, config, architecture, wanted, ranks, joining.rank, device)
    join_parts(model, plan, joining, sizes)
    nn.Module.to(model, device)
    if max_position is not None:
        pin_rope(model, min(max_position, max_model_len or max_position))

    agreed = agreed or agreement(joining, ranks)
    return prepare(model.eval(), device, "none", progress, fuses=False, agreed=agreed)


def agreement(joining: Joining, ranks: int) -> Agreed:
    """Return what says whether something is so on all ranks, by a sum of numbers in the hosts' memory."""
    return lambda here: int(joining.sum(torch.tensor([int(here)])).item()) == ranks


def _splittable_config(source: str | Path, ranks: int) -> PreTrainedConfig:
    """Read the config of a model of text alone, whose files are safetensors."""
    if is_gguf(source):
        raise ModelRefused(
            str(source), f"tensor_parallel {ranks}: a GGUF file is not split among ranks; name a folder of safetensors"
        )
    config = read_config(source)
    architecture = (config.architectures or [config.model_type])[0]
    if hears(config):
        raise ModelRefused(architecture, f"tensor_parallel {ranks}: a model of speech is not split: leave it out")
    if SpeechTokenFiles.read(source) is not None:
        text = f"tensor_parallel {ranks}: a model that generates speech tokens is not split: leave it out"
        raise ModelRefused(architecture, text)
    if is_composite(config):
        raise ModelRefused(
            architecture,
            f"tensor_parallel {ranks}: a model that takes images or sound is not split: leave it out, or name its text "
            "model",
        )
    if is_recurrent(config):
        raise ModelRefused(architecture, f"tensor_parallel {ranks}: recurrent layers are not split: leave it out")
    return config


@dataclass(frozen=True, eq=False)
class _Unread:
    """Stands for a weight of which a part will be read, and takes no memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, _: Any) -> Tensor:
        return torch.zeros(1, dtype=self.dtype).expand(self.shape)


def _load(
    source: str | Path,
    config: PreTrainedConfig,
    architecture: str,
    dtype: torch.dtype | str,
    ranks: int,
    rank: int,
    device: torch.device,
) -> tuple[PreTrainedModel, SplitPlan, dict[str, int]]:
    """Return a rank's part, the plan, and the whole sizes of what was cut, in the cut dimensions."""
    checkpoint, scheme = open_checkpoint(source, config, architecture)
    refuse_type(dtype, config, architecture)
    if is_quantized(checkpoint, scheme):
        raise ModelRefused(
            architecture,
            f"tensor_parallel {ranks}: quantized weights are not split: name others, or leave it out",
        )
    kind = computing_dtype(dtype, config, read_weights(checkpoint, scheme), architecture, device)
    auto: Any = AutoModelForCausalLM
    attention = {"attn_implementation": PAGED_ATTENTION}
    try:
        names = WeightNames(auto, config, attention)
        plan = split_plan(names.model, ranks)
        shapes = {name: tuple(weight.shape) for name, weight in names.model.named_parameters(remove_duplicate=False)}
        parts: dict[str, Stored] = {}
        tensors: dict[str, Any] = {}
        for key, stored in checkpoint.tensors.items():
            name, plain = names.find(key)
            if plain and name in plan.cuts and not names.is_tied(name) and stored.shape == shapes[name]:
                parts[name] = stored
                tensors[key] = _Unread(stored.shape, kind)
            else:
                tensors[key] = stored.slice
        model, info = auto._model_mapping[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=kind,
            **attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        check_loaded(architecture, info)
        sizes = {name: shapes[name][cut.dim] for name, cut in plan.cuts.items()}
        read = {
            name: part_of(_reader_of(stored), plan.cuts[name], sizes[name], rank, ranks).to(kind)
            for name, stored in parts.items()
        }
        cut_model(model, plan, rank, read)
    except LOAD_ERRORS as error:
        if isinstance(error, ModelRefused):
            raise
        raise ModelRefused(architecture, first_line(error)) from error
    return model, plan, sizes


def _reader_of(stored: Stored) -> ReadPart:
    def read(dim: int, first: int, last: int) -> Tensor:
        return stored[(*[slice(None)] * dim, slice(first, last))]

    return read
