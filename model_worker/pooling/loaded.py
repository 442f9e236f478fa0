"""A model of transformers that a one-shot task has been loaded for, before it is made fast."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from model_worker.cpu.encoder.pattern import require_form
from model_worker.decoder_form import UnsupportedPattern
from shared.pooling_files import PoolingFiles


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model of transformers before it is made fast. `base` is the model without its head."""

    files: PoolingFiles
    config: PreTrainedConfig
    task: str
    model: PreTrainedModel
    base: nn.Module
    vocab_size: int
    device: torch.device
    max_model_len: int
    has_kernels: bool

    @property
    def waits_for_kernels(self) -> bool:
        """Whether it would be faster with compiled layers, and they are not compiled yet."""
        if self.device.type != "cpu" or self.has_kernels:
            return False
        try:
            require_form(self.base)
        except UnsupportedPattern:
            return False
        return True

    @property
    def causal(self) -> bool:
        """Whether it is a decoder, whose last token has seen all others."""
        return type(self.config) in MODEL_FOR_CAUSAL_LM_MAPPING and type(self.config) not in MODEL_FOR_MASKED_LM_MAPPING
