"""The eyes of the embedded model: true pictures, questions that fit them, a trainer that leaves the decoder alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoProcessor

from demo_model.decoder import text_model
from demo_model.eyes import train as eyes
from demo_model.eyes.conversations import IGNORED, Conversations
from demo_model.eyes.model import SIDE, TOKENS, pixels
from demo_model.eyes.pictures import COLOURS, KINDS, draw
from demo_model.eyes.questions import ask, choices, described
from demo_model.train_tokenizer import IMAGE_TOKEN, load_tokenizer
from deploy.embedded_model import EMBEDDED_MODEL_PATH

# How far down a chart nothing but the highest bar is, as a share of the picture.
ABOVE_OTHERS = 0.3
# Noise leaves each channel of paper above it, and one channel of every bar below it.
LEAST_OF_PAPER = 130


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(EMBEDDED_MODEL_PATH)


def nearest(pixel: Any, colours: dict[str, Any]) -> str:
    return min(colours, key=lambda name: float(np.square(np.subtract(colours[name], pixel)).sum()))


def test_a_seed_draws_the_same_pictures() -> None:
    first, second = ([draw(random.Random(7), kind).image.tobytes() for kind in KINDS] for _ in range(2))
    assert first == second


def test_a_plain_colour_is_the_named_one() -> None:
    rng = random.Random(random.getrandbits(64))
    for _ in range(40):
        picture = draw(rng, "colour")
        assert nearest(np.asarray(picture.image, np.float32).mean((0, 1)), COLOURS) == picture.colour


def test_the_highest_bar_is_the_only_one_so_far_up() -> None:
    rng = random.Random(random.getrandbits(64))
    for _ in range(40):
        picture = draw(rng, "chart")
        assert len(set(picture.colours)) == int(picture.subject)
        row = int(ABOVE_OTHERS * picture.image.height)
        pixels_there = np.asarray(picture.image, np.float32)[row - 1 : row + 2]
        bar = pixels_there[pixels_there.min(-1) < LEAST_OF_PAPER]
        assert nearest(bar.mean(0), {name: COLOURS[name] for name in picture.colours}) == picture.highest


def test_the_trainer_sees_what_the_processor_makes() -> None:
    processor: Any = AutoProcessor.from_pretrained(EMBEDDED_MODEL_PATH)
    rng = random.Random(random.getrandbits(64))
    images = [draw(rng, kind).image for kind in KINDS]
    found = processor.image_processor(images, return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(pixels(images).numpy(), np.stack(list(found)), atol=1e-6)
    assert found[0].shape == (3, SIDE, SIDE)


def test_only_answers_are_learned(tokenizer: Any) -> None:
    rng = random.Random(random.getrandbits(64))
    pictures = [draw(rng, kind) for kind in KINDS for _ in range(8)]
    turns = Conversations(tokenizer, rng).about(pictures)
    for picture, is_image, targets in zip(pictures, turns.is_image, turns.targets, strict=True):
        learned = tokenizer.decode(targets[targets != IGNORED]).split("<|im_end|>")
        assert learned.pop() == ""
        assert learned
        assert set(learned) <= {described(picture), *(answer for _, answer in choices(picture))}
        assert int(is_image.sum()) == TOKENS


@pytest.mark.parametrize("kind", KINDS)
def test_every_question_has_an_answer_of_the_picture(kind: str) -> None:
    picture = draw(random.Random(3), kind)
    answers = {ask(picture, random.Random(seed))[1] for seed in range(60)}
    assert answers == {answer for _, answer in choices(picture)}


def test_a_short_training_is_served_as_the_long_one_and_leaves_the_decoder(tmp_path: Path) -> None:
    options = eyes.Options(
        conversations=4, pictures=8, seed=1, decoder=EMBEDDED_MODEL_PATH, output=tmp_path, threads=1, questions=1
    )
    eyes.train(options, Console(quiet=True))
    names = {path.name for path in EMBEDDED_MODEL_PATH.iterdir()} - {eyes.CHECKPOINT}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (EMBEDDED_MODEL_PATH / name).read_text()
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path, EMBEDDED_MODEL_PATH)]
    for config in configs:
        del config["transformers_version"]
    assert configs[0] == configs[1]
    made, shipped = (load_file(folder / "model.safetensors") for folder in (tmp_path, EMBEDDED_MODEL_PATH))
    assert {name: weight.shape for name, weight in made.items()} == {
        name: weight.shape for name, weight in shipped.items()
    }
    same = {name for name in made if torch.equal(made[name], shipped[name])}
    decoder = {name for name in made if "language_model" in name or name == "lm_head.weight"}
    assert decoder <= same
    assert len(decoder) == len(text_model(EMBEDDED_MODEL_PATH).state_dict()) - 1, "the head is the embedding"
    assert "## Pictures" in (tmp_path / "README.md").read_text()


def test_the_token_of_pictures_takes_no_text(tokenizer: Any) -> None:
    assert tokenizer.decode(tokenizer.encode("ÿ")) == "ÿ"
    assert tokenizer.convert_tokens_to_ids(IMAGE_TOKEN) not in tokenizer.encode("ÿ\xff")
