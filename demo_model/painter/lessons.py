"""The lessons of a training run: scenes, each as a plan of its drawing, the tokens of a text about it, and its facts.

They are drawn by seed, in several processes. Does not know models.
"""

import multiprocessing
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demo_model.painter.drawing import plan
from demo_model.painter.scenes import COLOURS, LANDSCAPES, PAPER, SYMBOLS, Scene, random_scene, words_of

# Scenes that are drawn by one seed.
_CHUNK = 2048
_BACKGROUNDS = (PAPER, *COLOURS, *LANDSCAPES)
# The numbers of values of the facts about a scene: symbol, colour, column and row of the first thing, those of the
# second or the number behind their last, and the background.
FACTS = (*(2 * (len(SYMBOLS) + 1, len(COLOURS) + 1, 4, 4)), len(_BACKGROUNDS))


@dataclass(frozen=True)
class Lessons:
    """`plans` are f32[N, columns] for `drawing.draw`, `tokens` and their `mask` i64[N, L], `facts` i64[N, FACTS]."""

    plans: Tensor
    tokens: Tensor
    mask: Tensor
    facts: Tensor


def lessons(count: int, seed: int, tokenizer: Any, processes: int) -> Lessons:
    """Draw so many scenes, rounded up to a chunk. Forks: to be called before a GPU is used."""
    chunks = [(seed, i) for i in range(-(-count // _CHUNK))]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        made = pool.map(_chunk, chunks)
    plans, texts, facts = ([one for chunk in made for one in chunk[i]] for i in range(3))
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    return Lessons(torch.tensor(plans), encoded.input_ids, encoded.attention_mask, torch.tensor(facts))


def _chunk(place: tuple[int, int]) -> tuple[list[list[float]], list[str], list[list[int]]]:
    rng = random.Random(f"{place[0]}/{place[1]}")
    scenes = [random_scene(rng) for _ in range(_CHUNK)]
    return [plan(rng, scene) for scene in scenes], [words_of(rng, scene) for scene in scenes], list(map(_facts, scenes))


def _facts(scene: Scene) -> list[int]:
    found = []
    for thing in scene.things:
        found += [SYMBOLS.index(thing.symbol), list(COLOURS).index(thing.colour), thing.column, thing.row]
    nothing = [count - 1 for count in FACTS[:-1]]
    return [*found, *nothing[len(found) :], _BACKGROUNDS.index(scene.background)]
