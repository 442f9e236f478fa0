"""The hooks of adapters alone: threads that load and free at once, and passes that no adapter changes."""

from __future__ import annotations

from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from model_worker.adapters.fitting import AdaptedEmbedding, AdaptedLinear, Adapter
from model_worker.adapters.hooks import AdapterHooks
from model_worker.batch import ForwardBatch

RANK = 2
VOCAB = 16
WIDTH = 8


@pytest.fixture
def model() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=VOCAB, n_positions=8, n_embd=WIDTH, n_layer=1, n_head=1)
    model = GPT2LMHeadModel(config)
    model.eval()
    return model


@pytest.fixture
def hooks(model: GPT2LMHeadModel) -> AdapterHooks:
    return AdapterHooks(model, torch.device("cpu"), torch.float32)


def linear(outputs: int) -> AdaptedLinear:
    return AdaptedLinear(torch.ones(RANK, WIDTH), torch.ones(outputs, RANK), 1.0, None, None)


class Interrupted(dict[nn.Module, Any]):
    """Drops an adapter in another thread while one is being added. The pause is longer than a drop takes."""

    def __init__(self, given: dict[nn.Module, Any], hooks: AdapterHooks, dropped: int) -> None:
        super().__init__(given)
        self.thread = Thread(target=hooks.drop, args=(dropped,))

    def setdefault(self, key: Any, default: Any = None, /) -> Any:
        found = super().setdefault(key, default)
        if self.thread.ident is None:
            self.thread.start()
            self.thread.join(0.2)
        return found


def test_an_adapter_that_comes_while_another_leaves_loses_no_module(
    model: GPT2LMHeadModel, hooks: AdapterHooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = model.lm_head
    tokens = torch.arange(3)
    before = model(input_ids=tokens[None]).logits
    hooks.add(1, Adapter("", RANK, {module: linear(VOCAB)}, None))
    interrupted = Interrupted(hooks._linears, hooks, dropped=1)
    monkeypatch.setattr(hooks, "_linears", interrupted)
    hooks.add(2, Adapter("", RANK, {module: linear(VOCAB)}, None))
    interrupted.thread.join(60)
    with hooks.rows(batch(2)):
        after = model(input_ids=tokens[None]).logits
    assert not torch.equal(before, after)
    assert interrupted[module].keys() == {2}


def test_a_want_of_memory_leaves_nothing_of_an_adapter(
    model: GPT2LMHeadModel, hooks: AdapterHooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    head: nn.Module = model.lm_head
    hooks.add(1, Adapter("", RANK, {head: linear(VOCAB)}, None))

    class Full:
        def laid_out(self, adapter: Adapter) -> Adapter:
            return adapter

        def add(self, *_: Any) -> None:
            raise torch.OutOfMemoryError("none is left")

        def drop(self, handle: int) -> None:
            pass

    monkeypatch.setattr(hooks, "slots", Full())
    module = model.get_submodule("transformer.h.0.mlp.c_fc")
    embedding = AdaptedEmbedding(torch.ones(VOCAB, RANK), torch.ones(WIDTH, RANK), 1.0)
    with pytest.raises(torch.OutOfMemoryError):
        hooks.add(2, Adapter("", RANK, {head: linear(VOCAB), module: linear(4 * WIDTH)}, embedding))
    assert {module: set(held) for module, held in hooks._linears.items()} == {head: {1}}
    assert not hooks._embeddings
    assert list(hooks._hooks) == [head]


def test_an_embedding_is_copied_only_for_rows_that_it_changes(model: GPT2LMHeadModel, hooks: AdapterHooks) -> None:
    embedding = AdaptedEmbedding(torch.ones(VOCAB, RANK), torch.ones(WIDTH, RANK), 1.0)
    table = model.get_input_embeddings()
    given: list[torch.Tensor] = []
    table.register_forward_hook(lambda module, arguments, output: given.append(output))
    hooks.add(1, Adapter("", RANK, {}, embedding))
    tokens = torch.arange(3)
    for handle, copied in ((2, False), (1, True)):
        with hooks.rows(batch(handle)):
            assert (table(tokens) is not given[-1]) == copied
    assert table(tokens) is given[-1]


def batch(handle: int) -> ForwardBatch:
    count = np.array([3])
    handles = np.array([handle], np.int32)
    blocks = np.zeros((1, 1), np.int32)
    return ForwardBatch.build(np.arange(3), count, count, blocks, 16, np.arange(3), adapters=handles)
