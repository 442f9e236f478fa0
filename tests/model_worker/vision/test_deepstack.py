"""What images add behind the first layers (DeepStack) is added by the fused stack as by transformers' modules."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from model_worker.batch import ForwardBatch
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner
from tests.model_worker.vision.tiny_composites import qwen3_vl
from tests.model_worker.vision.tiny_parts import HIDDEN, made

BLOCK_SIZE = 16
LENGTH = 70
LEVELS = 2
# Tokens that stand for an image.
SPAN = range(9, 50)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("qwen3_vl")
    made(qwen3_vl).model.save_pretrained(path)
    return load_model(path, "float32", "cpu", lambda *_: None)


class Sequences:
    """Three sequences of random tokens with an image each, in a cache of their own."""

    def __init__(self, loaded: LoadedModel, attention: str = "auto") -> None:
        draw = np.random.default_rng(3)
        each = -(-LENGTH // BLOCK_SIZE)
        self._backend = ModelRunner(loaded, 3 * each, BLOCK_SIZE, attention).backend
        self._tables = draw.permutation(3 * each).reshape(3, each).astype(np.int32)
        self._tokens = draw.integers(3, 180, (3, LENGTH))
        self._vectors = draw.standard_normal((3, len(SPAN), (1 + LEVELS) * HIDDEN), np.float32)

    def logits(self, *chunks: tuple[int, int, int]) -> list[Tensor]:
        """Compute of each sequence the tokens first to end, all in one pass."""
        lens = np.array([end - first for _, first, end in chunks])
        ends = np.array([end for *_, end in chunks])
        tokens = np.concatenate([self._tokens[one, first:end] for one, first, end in chunks])
        which = [one for one, *_ in chunks]
        places = []
        vectors = []
        start = 0
        for one, first, end in chunks:
            inside = [at for at in range(first, end) if at in SPAN]
            places += [start + at - first for at in inside]
            vectors += [self._vectors[one, at - SPAN.start] for at in inside]
            start += end - first
        # The order of an image's tokens in `embeddings` is anyone's.
        order = np.random.default_rng(5).permutation(len(places))
        embeddings = (np.array(places)[order], np.array(vectors)[order]) if places else None
        batch = ForwardBatch.build(
            tokens, lens, ends, self._tables[which], BLOCK_SIZE, np.arange(len(tokens)), embeddings=embeddings
        )
        return list(self._backend.logits(batch).clone().split(lens.tolist()))


def test_logits_are_those_of_the_modules(loaded: LoadedModel) -> None:
    assert loaded.stack is not None
    (fused,) = Sequences(loaded).logits((0, 0, LENGTH))
    (plain,) = Sequences(replace(loaded, stack=None), "reference").logits((0, 0, LENGTH))
    torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-3)
    text = Sequences(loaded)
    text._vectors[:, :, HIDDEN:] = 0
    assert not torch.allclose(text.logits((0, 0, LENGTH))[0], plain, atol=1e-2), "the levels matter"


def test_company_and_pieces_change_no_bit(loaded: LoadedModel) -> None:
    assert loaded.row_invariant
    wanted = [Sequences(loaded).logits((one, 0, LENGTH))[0] for one in range(3)]
    together = Sequences(loaded)
    cuts = [0, 20, 21, 45, LENGTH]
    pieces: list[list[Tensor]] = [[], [], []]
    for first, end in itertools.pairwise(cuts):
        for one, logits in enumerate(together.logits(*((one, first, end) for one in range(3)))):
            pieces[one].append(logits)
    for one in range(3):
        assert torch.equal(torch.cat(pieces[one]), wanted[one]), one
