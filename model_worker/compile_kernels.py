"""`python -m model_worker.compile_kernels --dtype bfloat16`: compiles the kernels of a CPU worker, or finds them.

numba's code depends on the types of numbers and not on sizes: a model of one tiny layer compiles the kernels of all
models that the fused stack runs, and the others share one for attention; one with weights in codes those of quantised
files (--family coded), and a tiny encoder those of all encoders like BERT (--family encoder). Recognisers of speech
need those of decoders and of encoders (--family speech), and perhaps those of halves (--family speech-in-halves). They
are kept in NUMBA_CACHE_DIR. Processes that want the same compile one after the other, and the second
one finds everything there.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from model_worker.attention import cpu
from model_worker.cpu import kernel_cache
from model_worker.cpu.gemm.encoded_linear import EncodedLinear, EncodedWeight
from model_worker.cpu.gemm.half_linear import HalfLinear
from model_worker.cpu.gemm.packed_linear import PACKED_DTYPES, PackedLinear
from model_worker.cpu.gemm.weight_format import PANEL
from model_worker.cpu.simd import bf12
from model_worker.cpu.simd.dot_codes import GROUP_INPUTS
from model_worker.grammar import apply_mask
from model_worker.loading.checkpoint import DTYPES
from model_worker.loading.prepare import prepare
from model_worker.pooling.fused import Fused
from model_worker.pooling.load import load_pooling
from model_worker.runner import ModelRunner
from model_worker.sampling.sampler import SamplerRows
from shared import logs
from shared.liveness import become
from shared.weight_codes import Codes, Grouped

# Niceness of the compilation: a quarter of a core where another process wants it.
NICE = 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m model_worker.compile_kernels", description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--family", choices=kernel_cache.FAMILIES, default=kernel_cache.DECODER)
    options = parser.parse_args()
    dtype = DTYPES[options.dtype]
    become("compile")
    logs.configure("compile", "warning")
    os.nice(NICE)
    directory = Path(os.environ["NUMBA_CACHE_DIR"])
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for family in kernel_cache.parts_of(options.family):
            if not kernel_cache.are_compiled(dtype, family):
                if family == kernel_cache.ENCODER:
                    compile_encoder(dtype)
                elif family == kernel_cache.HALVES:
                    compile_halves(dtype)
                else:
                    compile_kernels(dtype, family)


class _TinyCodes(EncodedWeight):
    """A weight in codes, all of them equal. Weights in codes of all kinds run in the same kernels."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape

    def rows(self, first: int, last: int) -> Tensor:
        return torch.from_numpy(self.codes(first, last).weight)

    @property
    def codes(self) -> Callable[[int, int], Codes]:
        inputs = self.shape[1]

        def read(first: int, last: int) -> Codes:
            scales = np.full((last - first, inputs // GROUP_INPUTS), 2.0**-6, np.float16)
            return Codes(np.zeros((last - first, inputs), np.uint8), 4, Grouped(scales), 8)

        return read


def compile_kernels(dtype: torch.dtype, family: str = kernel_cache.DECODER) -> None:
    """Run every kernel of a worker on a CPU whose weights have this type, or are in codes."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(dtype)
    if family == kernel_cache.CODED:
        for name, linear in [(name, part) for name, part in model.named_modules() if type(part) is nn.Linear]:
            codes = _TinyCodes((linear.out_features, linear.in_features))
            model.set_submodule(name, EncodedLinear(codes, None, dtype))
    loaded = prepare(model.eval(), torch.device("cpu"), "none", lambda *_: None)
    if loaded.stack is None:
        raise RuntimeError("the fused stack has not taken a model of its own form")
    ModelRunner(loaded, num_blocks=8, block_size=loaded.block_size).warm_up()
    if dtype in PACKED_DTYPES:
        # The stack has entries of its own. A recogniser's products are those of single layers.
        PackedLinear(torch.zeros(PANEL, PANEL, dtype=dtype), None).multiply(torch.zeros(1, PANEL, dtype=dtype))
    SamplerRows(1, loaded.vocab_size, loaded.device).warm_up()
    cpu.warm_up(dtype)
    bf12.warm_up()
    for masked in {torch.float32, dtype}:
        apply_mask.warm_up(masked)
    kernel_cache.record_compiled(dtype, family)


def compile_encoder(dtype: torch.dtype) -> None:
    """Run every kernel that an encoder like BERT needs with weights of this type: by loading one."""
    config = BertConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    made: Any = BertModel(config)
    with tempfile.TemporaryDirectory() as folder:
        made.to(dtype).save_pretrained(folder)
        name = str(dtype).removeprefix("torch.")
        backbone = load_pooling(folder, dtype=name).backbone
    if not isinstance(backbone, Fused):
        raise RuntimeError("the fused layers have not taken an encoder of their own form")
    kernel_cache.record_compiled(dtype, kernel_cache.ENCODER)


def compile_halves(dtype: torch.dtype) -> None:
    """Run the kernels of products with weights that are float16's numbers in a model of this type, float32."""
    HalfLinear(torch.zeros(PANEL, PANEL), None).multiply(torch.zeros(1, PANEL))
    kernel_cache.record_compiled(dtype, kernel_cache.HALVES)


if __name__ == "__main__":
    main()
