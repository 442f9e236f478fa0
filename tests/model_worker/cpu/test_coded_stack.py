"""A model whose weights are in codes of different kinds runs in the fused stack, as it does dequantised."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from interfaces import SamplingParams
from interfaces.request.sampling import LogprobMode
from model_worker.cpu.gemm.coded_linear import WordLinear
from model_worker.cpu.gemm.embedding import CodedEmbedding
from model_worker.loading.prepare import prepare
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner
from tests.model_worker.cpu.coded_weights import KINDS, coded
from tests.model_worker.cpu.test_fused_stack import batches, logits, relative, truth
from tests.model_worker.drafters.oracle import Oracle
from tests.model_worker.tiny_models import VOCAB
from tests.system.in_process import InProcessServer, Shape
from tests.system.test_drafts import Asked, check_equal, served

# A stack of its own format is compiled first.
pytestmark = pytest.mark.timeout(600)

# Kinds in the order in which the model has linear layers, so that one layer of it has different ones. None: bfloat16.
MIXED = ("Q4_K", "Q5_0", "Q6_K", "Q4_0", "Q8_0", "GPTQ 4 bits", None, "Q5_K", "IQ4_XS", "FP8 of blocks", "NF4")


def tiny() -> Any:
    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model: Any = Qwen2ForCausalLM(config)
    return model.eval()


def swap(model: Any, dtype: torch.dtype, head: str | None) -> None:
    """Give every linear layer of a model a random weight in codes, but for some that get a bfloat16 one."""
    rng = np.random.default_rng(5)
    number = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, nn.Linear):
                continue
            kind = head if name == "lm_head" else MIXED[number % len(MIXED)]
            number += 1
            bias = None if child.bias is None else child.bias.to(dtype)
            if kind is None:
                child.weight.data = child.weight.bfloat16().to(dtype)
                continue
            codes = KINDS[kind](rng, child.out_features, child.in_features)
            base = codes.scales.base / np.float32(8 * codes.weight.std() * child.in_features**0.5 / 4)
            least = codes.minimums
            scale = np.float32(base.flat[0] / codes.scales.base.astype(np.float32).flat[0])
            codes = codes._replace(
                scales=codes.scales._replace(base=base),
                minimums=None if least is None else least._replace(base=least.base * scale),
            )
            setattr(parent, name, coded(codes, bias, dtype))


def exact(model: Any) -> Any:
    """The same model in float32, with dequantised weights."""
    plain = tiny()
    for name, module in list(plain.named_modules()):
        other = model.get_submodule(name)
        if isinstance(module, nn.Linear):
            weight = other.rows(torch.arange(module.out_features)) if hasattr(other, "rows") else other.weight.float()
            module.weight.data = weight
            if module.bias is not None:
                module.bias.data = other.bias.float()
        elif isinstance(getattr(module, "weight", None), torch.Tensor):
            module.weight.data = other.weight.float()
    return plain


def prepared(dtype: torch.dtype, head: str | None) -> tuple[LoadedModel, Any]:
    model = tiny().to(dtype)
    swap(model, dtype, head)
    reference = exact(model)
    return prepare(model, torch.device("cpu"), "none", lambda *_: None), reference


# Each type compiles a stack.
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "head"), [(torch.float32, None), (torch.bfloat16, "Q6_K")])
def test_the_stack_gives_the_logits_of_the_dequantised_model(dtype: torch.dtype, head: str | None) -> None:
    loaded, reference = prepared(dtype, head)
    assert loaded.stack is not None
    assert isinstance(loaded.model.lm_head, WordLinear) == (head is None)
    steps = batches(np.random.default_rng(), 16, 32)
    got = logits(ModelRunner(loaded, 32, 16), steps)
    assert relative(got, truth(reference, steps)) < (5e-4 if dtype == torch.float32 else 0.02)


@pytest.mark.slow
def test_an_embedding_may_be_the_head_in_codes() -> None:
    model = tiny()
    swap(model, torch.float32, "Q8_0")
    model.model.embed_tokens = CodedEmbedding(model.lm_head, model.model.embed_tokens)
    reference = exact(model)
    loaded = prepare(model, torch.device("cpu"), "none", lambda *_: None)
    assert loaded.stack is not None
    assert loaded.hidden_size == 256
    assert len([name for name, _ in model.named_modules() if "embed" in name]) == 1
    steps = batches(np.random.default_rng(), 16, 32)
    assert relative(logits(ModelRunner(loaded, 32, 16), steps), truth(reference, steps)) < 5e-4


@pytest.mark.slow
def test_no_guess_changes_an_answer_of_weights_in_codes() -> None:
    """As in the stack's other formats: a row's bits do not depend on the tile that it falls into."""
    loaded, _ = prepared(torch.bfloat16, "Q6_K")
    assert loaded.row_invariant
    rng = random.Random(3)
    params = [SamplingParams(temperature=t, seed=7, logprobs=LogprobMode.TEMPERED, max_new_tokens=24) for t in (0, 0.8)]
    asked: Asked = [([3 + i, *(rng.randrange(3, VOCAB) for _ in range(3 * i))], params[i % 2], {}) for i in range(7)]
    shape = Shape(num_blocks=34, block_size=16, max_model_len=120, device_overlap="cpu")
    plain = served(InProcessServer(loaded, shape), asked)
    texts = [prompt + answer.tokens for (prompt, _, _), answer in zip(asked, plain, strict=True)]
    for chance in (0.0, 0.6, 1.0):
        oracle = Oracle(texts, chance, VOCAB, 3)
        server = InProcessServer(loaded, replace(shape, most_guesses=5, drafters=[oracle]))
        check_equal(plain, served(server, asked), asked, 3)
        (engine,) = server.engines.values()
        assert engine.counters.drafted > 0
        assert (engine.counters.accepted > 0) == (chance > 0)
