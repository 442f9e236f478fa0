"""The cores that an image is encoded with follow the steps beside it, and change no bit of its features."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from model_worker.vision.cores import EncoderCores
from model_worker.vision.encoder import make_encoder
from model_worker.vision.family import family_of
from tests.model_worker.vision.tiny_composites import idefics3, internvl, qwen2_5_vl, qwen3_vl
from tests.model_worker.vision.tiny_parts import Tiny, made


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_an_image_takes_all_cores_while_no_step_runs_and_some_beside_steps() -> None:
    now = [100.0]
    layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])
    shares: list[int] = []
    cores = EncoderCores(iter(layers), beside=1, alone=2, share=shares.append, clock=lambda: now[0])
    vector = torch.zeros(2)
    cores.take()
    layers[0](vector)
    assert shares == [2]
    assert torch.get_num_threads() == 2
    cores.step_began()
    assert shares == [2, 1]
    # A step may last for long.
    now[0] += 1.0
    layers[1](vector)
    assert torch.get_num_threads() == 1
    cores.steps_ended()
    now[0] += 0.01
    layers[2](vector)
    assert torch.get_num_threads() == 1
    now[0] += 0.1
    layers[3](vector)
    assert torch.get_num_threads() == 2
    cores.give_back()
    cores.take()
    assert shares == [2, 1, 1, 2, 0, 2]


@pytest.mark.parametrize("family", [idefics3, internvl, qwen2_5_vl, qwen3_vl])
def test_features_have_the_same_bits_with_any_number_of_cores(family: Callable[[], Tiny]) -> None:
    tiny = made(family)
    composite: Any = tiny.model
    composite.to(torch.bfloat16)
    kind = family_of(composite.config)
    assert kind is not None
    encoder = make_encoder(composite, kind, torch.bfloat16, torch.device("cpu"))
    image = tiny.image(tiny.draw(), 0)
    torch.set_num_threads(1)
    want = encoder.encode(image)
    shares: list[int] = []
    # By this clock every second layer comes long after the last step has ended, and the others right after it.
    clock = itertools.cycle([0.0, 100.0])
    cores = EncoderCores(encoder.layers(), beside=1, alone=3, share=shares.append, clock=lambda: next(clock))
    cores.step_began()
    cores.steps_ended()
    for _ in range(2):
        cores.take()
        assert np.array_equal(encoder.encode(image), want)
    assert {1, 3} == set(shares)
