"""Adapters of a vision tower: features belong to a content, and an adapter that is read late or leaves spoils none."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from interfaces import ImageMetadata, Join, SamplingParams
from model_worker.adapters.fitting import AdaptedLinear
from model_worker.vision.cores import EncoderCores
from model_worker.vision.encode_queue import ALL_TOKENS, EncodeQueue, ReadyRow
from model_worker.vision.encoder import Encoder, EncoderCache, make_encoder
from model_worker.vision.family import family_of
from model_worker.vision.rows import ImageRows
from tests.model_worker.vision.tiny_composites import qwen2_vl
from tests.model_worker.vision.tiny_parts import Tiny, made

HASH = 77


@pytest.fixture
def tiny() -> Tiny:
    return made(qwen2_vl)


@pytest.fixture
def encoder(tiny: Tiny) -> Encoder:
    kind = family_of(tiny.model.config)
    assert kind is not None
    return make_encoder(tiny.model, kind, torch.float32, torch.device("cpu"))


def change(encoder: Encoder, seed: int) -> dict[nn.Module, AdaptedLinear]:
    """Return a change of the tower's first layer."""
    name = next(name for name in encoder.adapters.modules if name.endswith("blocks.0.attn.qkv"))
    module: Any = encoder.adapters.modules[name]
    draws = torch.Generator().manual_seed(seed)
    a = torch.randn(2, module.in_features, generator=draws)
    b = torch.randn(module.out_features, 2, generator=draws)
    return {module: AdaptedLinear(a, b, 1.0, None, None)}


def join(tiny: Tiny, row: int, image: ImageMetadata, adapter: int) -> Join:
    tokens, _ = tiny.prompt([[3, 4], [5]])
    return Join(
        row=row,
        tokens=tokens.astype(np.int32),
        prompt_len=len(tokens),
        start=0,
        sampling=SamplingParams(),
        images=[image],
        adapter=adapter,
    )


def wait_for(queue: EncodeQueue, rows: int) -> list[ReadyRow]:
    """Return what the queue reports until so many rows have all of their images."""
    deadline = time.monotonic() + 60
    found: list[ReadyRow] = []
    while sum(ready.upto == ALL_TOKENS for ready in found) < rows:
        assert time.monotonic() < deadline, found
        found += queue.take()
        time.sleep(0.001)
    return found


def test_features_of_one_image_belong_to_contents(tiny: Tiny, encoder: Encoder) -> None:
    """Also where an adapter changes nothing here, and where two have one content."""
    images = ImageRows(encoder, EncoderCache(1 << 20))
    for handle, digest, seed in ((1, "one", 1), (2, "two", 2), (4, "one", 1)):
        encoder.adapters.add(handle, digest, change(encoder, seed))
    encoder.adapters.add(3, "text alone", {})
    _, (start,) = tiny.prompt([[3, 4], [5]])
    image = tiny.image(tiny.draw(), start, HASH)
    for row, handle in enumerate([0, 1, 2, 3, 4, 1, 0]):
        images.join(join(tiny, row, image, handle), step=1)
    found = [images._rows[row].features[0] for row in range(7)]
    assert all(features is not None for features in found)
    same = [[int(np.array_equal(a, b)) for b in found] for a in found]  # type: ignore[arg-type]
    kinds = ["base", "one", "two", "base", "one", "one", "base"]
    assert same == [[int(a == b) for b in kinds] for a in kinds]
    assert images.cache.hits == 4


def test_a_row_whose_adapter_is_read_late_waits_for_it(tiny: Tiny, encoder: Encoder) -> None:
    images = ImageRows(encoder, EncoderCache(1 << 20))
    queue = EncodeQueue(images, EncoderCores(encoder.layers(), beside=1, alone=1, share=lambda _: None))
    _, (start,) = tiny.prompt([[3, 4], [5]])
    image = tiny.image(tiny.draw(), start, HASH)
    images.join(join(tiny, 0, image, 1), step=1)
    images.join(join(tiny, 1, image, 0), step=1)
    assert [ready.row for ready in wait_for(queue, 1)] == [1]
    assert images._rows[0].features == [None]
    encoder.adapters.add(1, "one", change(encoder, 1))
    assert [ready.row for ready in wait_for(queue, 1)] == [0]
    features = [images._rows[row].features[0] for row in range(2)]
    assert features[0] is not None
    assert features[1] is not None
    assert np.abs(features[0] - features[1]).max() > 1e-3
    np.testing.assert_array_equal(features[0], encoder.encode(image, 1, "one"))


@pytest.mark.parametrize("again", [False, True])
def test_an_adapter_that_leaves_meanwhile_spoils_no_features(tiny: Tiny, encoder: Encoder, again: bool) -> None:
    image = tiny.image(tiny.draw(), 0, HASH)
    changed = change(encoder, 1)
    encoder.adapters.add(1, "one", changed)

    def leave(*_: Any) -> None:
        encoder.adapters.drop(1)
        if again:
            encoder.adapters.add(1, "one", changed)

    hook: Callable[[], None] = next(iter(changed)).register_forward_pre_hook(leave).remove
    with pytest.raises(ValueError, match="adapter has left memory meanwhile"):
        encoder.encode(image, 1, "one")
    hook()
    encoder.adapters.drop(1)
    with pytest.raises(ValueError, match="adapter has left memory"):
        encoder.encode(image, 1, "one")
    encoder.adapters.add(1, "two", changed)
    with pytest.raises(ValueError, match="adapter has left memory"):
        encoder.encode(image, 1, "one")
