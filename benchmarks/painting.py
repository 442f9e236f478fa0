"""`python -m benchmarks.painting`: images of our painter beside diffusers' own call, in one process.

D1: images one after another. D8: eight at once. Without `--model` a small random Stable Diffusion is made. With
`--step-cache` also the speed and the quality of reused steps: PSNR against the exact images.

Knows the pipeline within one process. It starts no server.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.figures import show
from interfaces import PaintingContext, PoolingTask
from model_worker.pipelines.pixels import PixelPipeline
from model_worker.pixels.load import load_painter
from shared.pixel_files import PixelFiles

PROMPTS = ("a red train in the rain", "the bridge at night", "a bowl of fruit", "snow on the roofs")
IN_FLIGHT = {"D1": 1, "D8": 8}

Image = NDArray[np.float32]


@dataclass(frozen=True)
class Setting:
    images: int
    steps: int
    size: int
    guidance: float
    seed: int


def contexts(setting: Setting, step_cache: float = 0.0) -> list[PaintingContext]:
    return [
        PaintingContext.of(
            [[0, 1]],
            PoolingTask.PAINT,
            seeds=np.array([setting.seed + i]),
            prompt=PROMPTS[i % len(PROMPTS)],
            height=setting.size,
            width=setting.size,
            steps=setting.steps,
            guidance_scale=setting.guidance,
            step_cache=step_cache,
        )
        for i in range(setting.images)
    ]


def by_diffusers(pipe: Any, wanted: Sequence[PaintingContext]) -> list[Image]:
    """One call for each image, as an application of diffusers has it."""
    return [
        pipe(
            each.prompt,
            height=each.height,
            width=each.width,
            num_inference_steps=each.steps,
            guidance_scale=each.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(int(each.seeds[0])),
            output_type="np",
        ).images[0]
        for each in wanted
    ]


def by_us(pipeline: PixelPipeline, wanted: Sequence[PaintingContext], in_flight: int) -> list[Image]:
    groups = [list(wanted[i : i + in_flight]) for i in range(0, len(wanted), in_flight)]
    return [image for group in groups for (image,) in pipeline.paint(group)]


def timed(work: Callable[[], list[Image]], rounds: int) -> tuple[float, list[Image]]:
    """The least seconds of some rounds, and the images."""
    best = math.inf
    images: list[Image] = []
    for _ in range(rounds):
        began = time.perf_counter()
        images = work()
        best = min(best, time.perf_counter() - began)
    return best, images


def psnr(images: Sequence[Image], exact: Sequence[Image]) -> float:
    """Decibels of peak over error, of all images together; infinite for equal ones."""
    error = float(np.mean([np.mean((one - other) ** 2) for one, other in zip(images, exact, strict=True)]))
    return math.inf if error == 0 else -10 * math.log10(error)


def measure(model: Path, setting: Setting, rounds: int, thresholds: Sequence[float]) -> dict[str, dict[str, float]]:
    """The figures of D1, of D8, and of each threshold of the step cache."""
    painter = load_painter(model)
    pipeline = PixelPipeline(painter)
    # The same loading, and weights of its own.
    plain = getattr(diffusers, PixelFiles.read(model).kind)
    pipe = plain(**load_painter(model).family.pipe.components)
    pipe.set_progress_bar_config(disable=True)
    torch.set_grad_enabled(False)
    wanted = contexts(setting)
    by_diffusers(pipe, wanted[:1])
    by_us(pipeline, wanted[:1], 1)
    theirs, expected = timed(lambda: by_diffusers(pipe, wanted), rounds)
    figures: dict[str, dict[str, float]] = {}
    exact = math.nan
    for name, in_flight in IN_FLIGHT.items():
        exact, images = timed(partial(by_us, pipeline, wanted, in_flight), rounds)
        figures[name] = {
            "images/s": setting.images / exact,
            "diffusers, images/s": setting.images / theirs,
            "times diffusers": theirs / exact,
            "largest difference": max(float(np.abs(a - b).max()) for a, b in zip(images, expected, strict=True)),
        }
    counted = Counted(painter.family)
    for threshold in thresholds:
        counted.entries = 0
        by_us(pipeline, wanted, max(IN_FLIGHT.values()))
        every = counted.entries
        counted.entries = 0
        cached = contexts(setting, threshold)
        by_us(pipeline, cached, max(IN_FLIGHT.values()))
        share = counted.entries / every
        seconds, images = timed(partial(by_us, pipeline, cached, max(IN_FLIGHT.values())), rounds)
        figures[f"step_cache {threshold:g}"] = {
            "share of steps computed": share,
            "times exact": exact / seconds,
            "PSNR, dB": psnr(images, expected),
        }
    return figures


class Counted:
    """Counts the entries of a denoiser's batches."""

    def __init__(self, family: Any) -> None:
        self.entries = 0
        self._predict = family.predict
        family.predict = self._counting

    def _counting(self, latents: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.entries += len(latents)
        found: torch.Tensor = self._predict(latents, *rest)
        return found


def random_pipeline(folder: Path) -> Path:
    """Save a random Stable Diffusion of 4 million parameters, whose images have 64 pixels a side."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = [f"{letter}{end}" for letter in "abcdefghijklmnopqrstuvwxyz" for end in ("", "</w>")]
    vocabulary = {text: i for i, text in enumerate(["<|startoftext|>", "<|endoftext|>", *letters])}
    torch.manual_seed(0)
    encoder = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    vae = {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "norm_num_groups": 8}
    blocks = {"block_out_channels": (32, 64), "layers_per_block": 1}
    made = diffusers.StableDiffusionPipeline(
        unet=diffusers.UNet2DConditionModel(
            sample_size=32,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=32,
            attention_head_dim=8,
            norm_num_groups=8,
            **blocks,
        ),
        scheduler=diffusers.DDIMScheduler(
            beta_schedule="scaled_linear", clip_sample=False, set_alpha_to_one=False, steps_offset=1
        ),
        vae=diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **vae, **blocks
        ),
        text_encoder=CLIPTextModel(encoder),
        tokenizer=CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    made.save_pretrained(folder)
    return folder


def numbers(text: str) -> list[float]:
    """The values of a list. Raises ValueError."""
    found = [float(part) for part in text.split(",") if part.strip()]
    if wrong := [each for each in found if not 0 < each <= 1]:
        raise ValueError(f"step-cache must be a list of numbers above 0 and up to 1, got {wrong[0]:g}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.painting", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, help="a folder with model_index.json; default: a small random pipeline")
    add("--images", type=int, default=8)
    add("--steps", type=int, default=20)
    add("--size", type=int, default=64, help="pixels of a side")
    add("--guidance", type=float, default=7.5)
    add("--rounds", type=int, default=3, help="each figure is the best of these")
    add("--threads", type=int, default=0, help="threads of torch; 0: as it decides")
    add("--step-cache", default="", help="thresholds to judge, with commas")
    add("--seed", type=int, default=1)
    add("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    setting = Setting(options.images, options.steps, options.size, options.guidance, options.seed)
    try:
        thresholds = numbers(options.step_cache)
        with tempfile.TemporaryDirectory() as folder:
            model = options.model or random_pipeline(Path(folder) / "pipeline")
            figures = measure(model, setting, options.rounds, thresholds)
    except ValueError as error:
        print(f"painting: {error}", file=sys.stderr)
        return 1
    show(figures, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
