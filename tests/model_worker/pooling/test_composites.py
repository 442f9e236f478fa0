"""Texts of models that take images: their text model makes the vectors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from interfaces import PoolingContext, PoolingTask
from model_worker.pooling.load import load_pooling
from model_worker.vision.composite import decoder_of
from tests.model_worker.vision.tiny_composites import idefics3, llava
from tests.model_worker.vision.tiny_parts import Tiny, made


@pytest.mark.parametrize("make", [llava, idefics3], ids=lambda make: make.__name__)
def test_a_model_with_eyes_embeds_texts(make: Callable[[], Tiny], tmp_path: Path) -> None:
    model = made(make).model
    model.save_pretrained(tmp_path)
    pooler = load_pooling(tmp_path, dtype="float32", task="embed")
    texts = [np.array(ids, np.int32) for ids in ([5, 6, 7], [9] * 12, [3])]
    got, _ = pooler.run(PoolingContext.of(texts, PoolingTask.EMBED))
    with torch.no_grad():
        states = [decoder_of(model)(input_ids=torch.tensor([text.tolist()])).last_hidden_state for text in texts]
    last = torch.stack([state[0, -1] for state in states])
    np.testing.assert_allclose(got, torch.nn.functional.normalize(last, dim=-1).numpy(), atol=1e-5)
