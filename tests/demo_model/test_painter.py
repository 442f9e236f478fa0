"""The lessons of the small painter: drawings that show what their words say, and a trainer that learns."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from demo_model.painter import train
from demo_model.painter.drawing import SIDE, draw, plan
from demo_model.painter.judge import Seen, is_judged, see
from demo_model.painter.lessons import lessons
from demo_model.painter.model import new_tokenizer
from demo_model.painter.scenes import PAPER, Scene, random_scene, words_of
from deploy.embedded_model import EMBEDDED_PAINTER_PATH
from interfaces import PaintingContext, PoolingTask


def judged_scenes(count: int) -> list[Scene]:
    rng = random.Random(random.getrandbits(64))
    found: list[Scene] = []
    while len(found) < count:
        scene = random_scene(rng)
        found += [scene] if is_judged(scene) else []
    return found


@pytest.mark.slow
def test_the_judge_sees_in_drawings_what_was_drawn() -> None:
    scenes = judged_scenes(300)
    drawn = (draw(torch.tensor([plan(random.Random(i), scene) for i, scene in enumerate(scenes)])) + 1) / 2
    seen = [see(pixels) for pixels in drawn.permute(0, 2, 3, 1).numpy()]
    right = 0
    for scene, found in zip(scenes, seen, strict=True):
        thing = scene.things[0]
        background = "white" if scene.background == PAPER else scene.background
        right += found == Seen(thing.symbol, thing.colour, background, thing.column, thing.row)
    assert right >= 0.93 * len(scenes)


def test_the_judge_sees_nothing_on_an_empty_picture() -> None:
    assert see(torch.full((SIDE, SIDE, 3), 0.5).numpy()) is None


def test_the_painter_knows_the_words_of_scenes() -> None:
    tokenizer = new_tokenizer()
    rng = random.Random(random.getrandbits(64))
    texts = [words_of(rng, random_scene(rng)) for _ in range(400)]
    ids = tokenizer(texts).input_ids
    unknown = [tokenizer.unk_token_id in text for text in ids]
    # One scene in ten is said with a word that stands for nothing.
    assert 0 < sum(unknown) < len(texts) / 5
    assert max(map(len, ids)) <= tokenizer.model_max_length


def test_a_seed_draws_the_same_lessons() -> None:
    first, second, other = (lessons(1, seed, new_tokenizer(), 1) for seed in (5, 5, 6))
    assert torch.equal(first.plans, second.plans)
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.facts, second.facts)
    assert not torch.equal(first.plans, other.plans)


@pytest.mark.slow
def test_training_learns_and_saves_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(train.LESSONS, "cpu", 1)
    monkeypatch.setitem(train.SIZES, "cpu", 4)
    options = train.Options(minutes=0.05, device="cpu", seed=7, output=tmp_path, threads=1, start_from=None)
    training: Any = train.Training(options, Console(quiet=True))
    before = {name: value.clone() for name, value in training.denoiser.state_dict().items()}
    training.run()
    assert any(not torch.equal(value, before[name]) for name, value in training.denoiser.state_dict().items())
    training.save(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 6_000_000
    from model_worker.pixels.load import load_painter

    assert load_painter(tmp_path).architecture == "PixArtAlphaPipeline"


@pytest.mark.slow
def test_the_embedded_painter_paints_what_it_is_told() -> None:
    from model_worker.pixels.load import load_painter

    painter = load_painter(EMBEDDED_PAINTER_PATH)
    scenes = [scene for scene in judged_scenes(160) if (scene.things[0].column, scene.things[0].row) == (1, 1)]
    right = 0
    for start in range(0, len(scenes), 16):
        for row, scene in enumerate(scenes[start : start + 16]):
            prompt = words_of(random.Random(start + row), scene)
            wanted: dict[str, Any] = {"height": SIDE, "width": SIDE, "steps": 12, "guidance_scale": 2.0}
            seeds = np.array([start + row])
            painter.begin(row, PaintingContext.of([[0]], PoolingTask.PAINT, seeds=seeds, prompt=prompt, **wanted))
        images: dict[int, Any] = {}
        while len(painter):
            images |= painter.advance(range(16)).images
        for row, scene in enumerate(scenes[start : start + 16]):
            found = see(images[row].reshape(SIDE, SIDE, 3))
            wanted_thing = scene.things[0].symbol, scene.things[0].colour
            right += found is not None and (found.symbol, found.colour) == wanted_thing
    # 98 of 100 in the middle are right.
    assert right >= 0.9 * len(scenes)
