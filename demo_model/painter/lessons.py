"""The lessons of a training run: scenes, each as a plan of its drawing and as the tokens of a text about it.

They are drawn by seed, in several processes. Does not know models.
"""

import multiprocessing
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demo_model.painter.drawing import plan
from demo_model.painter.scenes import random_scene, words_of

# Scenes that are drawn by one seed.
_CHUNK = 2048


@dataclass(frozen=True)
class Lessons:
    """`plans` are f32[N, columns] for `drawing.draw`, `tokens` i64[N, 77]."""

    plans: Tensor
    tokens: Tensor


def lessons(count: int, seed: int, tokenizer: Any, processes: int) -> Lessons:
    """Draw so many scenes, rounded up to a chunk. Forks: to be called before a GPU is used."""
    chunks = [(seed, i) for i in range(-(-count // _CHUNK))]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        made = pool.map(_chunk, chunks)
    texts = [text for _, some in made for text in some]
    ids = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids
    return Lessons(torch.tensor([row for rows, _ in made for row in rows]), ids)


def _chunk(place: tuple[int, int]) -> tuple[list[list[float]], list[str]]:
    rng = random.Random(f"{place[0]}/{place[1]}")
    scenes = [random_scene(rng) for _ in range(_CHUNK)]
    return [plan(rng, scene) for scene in scenes], [words_of(rng, scene) for scene in scenes]
