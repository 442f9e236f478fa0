"""What the alignment heads of a recogniser attend to: that of transformers, in memory for the wanted tokens alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model_worker.batch import ForwardBatch
from model_worker.execution.rehearsal import Rehearsal
from model_worker.loading.load import load_model
from model_worker.model import LoadedModel
from model_worker.runner import ModelRunner
from shared.recogniser_files import clip_tokens
from tests.model_worker.hearing.tiny_whisper import POSITIONS, TARGETS, features, load, speech, tiny_whisper

CLIP = clip_tokens(POSITIONS)
# Layer and head, in the order of layers.
HEADS = ((0, 1), (1, 0))
COUNT = 6


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that an operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.elements = max(self.elements, found.numel())
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder, "float32", "cpu", lambda *_: None)


def test_attention_is_that_of_transformers_and_is_made_for_wanted_tokens_alone(
    folder: Path, loaded: LoadedModel
) -> None:
    model: Any = load(folder)
    generator = np.random.default_rng()
    clip = torch.from_numpy(features(speech(int(generator.integers(1000)), 0.8)))[None]
    tokens = generator.integers(20, 500, COUNT)
    with torch.no_grad():
        states = model.model.encoder(clip).last_hidden_state
        output = model(
            encoder_outputs=(states,), decoder_input_ids=torch.from_numpy(tokens)[None], output_attentions=True
        )
    want = torch.cat([output.cross_attentions[layer][0, head] for layer, head in HEADS], 1)

    runner = ModelRunner(loaded, 18, 16)
    total = CLIP + COUNT
    wanted = [total - 1, CLIP - 1, CLIP + 2]
    batch = ForwardBatch.build(
        np.concatenate([np.zeros(CLIP, np.int64), tokens]),
        np.array([total]),
        np.array([total]),
        np.arange(18, dtype=np.int32)[None],
        16,
        np.array(wanted),
        embeddings=(np.arange(POSITIONS), states[0].numpy()),
    )
    with Largest() as largest:
        logits, got = runner.backend.hidden(batch)
    torch.testing.assert_close(got, torch.stack([want[5], torch.zeros_like(want[0]), want[2]]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[0], output.logits[0, -1], atol=1e-3, rtol=1e-3)
    # All tokens would take so many.
    assert largest.elements < total * want.shape[1]


def test_the_largest_steps_have_words_of_all_rows(loaded: LoadedModel) -> None:
    steps = Rehearsal(loaded, max_tokens=300, max_rows=3, max_model_len=CLIP + TARGETS)
    backend: Any = steps._runner.backend
    seen: list[tuple[ForwardBatch, Any]] = []
    hidden = backend.hidden

    def noted(batch: ForwardBatch) -> Any:
        found = hidden(batch)
        seen.append((batch, found))
        return found

    backend.hidden = noted
    steps.decode()
    [(batch, (_, attention))] = seen
    assert batch.positions.tolist() == [CLIP] * 3
    assert attention.shape == (3, len(HEADS) * POSITIONS)
    torch.testing.assert_close(attention.sum(1), torch.full((3,), float(len(HEADS))))
