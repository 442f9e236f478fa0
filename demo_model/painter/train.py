"""Trains a small painter: first the VAE, which makes latents of drawings, then what paints latents of words.

    python -m demo_model.painter.train --output FOLDER [--minutes 90] [--device cuda] [--seed 7]

The lessons are drawn by seed. An interrupted run (Ctrl-C, SIGTERM) is saved. Needs torch, transformers, diffusers and
rich, and nothing of the server. Does not know scenes and drawings.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from demo_model.painter import model as models
from demo_model.painter.drawing import draw
from demo_model.painter.lessons import Lessons, lessons
from demo_model.run import Interruption, move, progress_bar, rate

MINUTES = 90.0
# Share of the time that is the VAE's.
VAE_SHARE = 0.3
# Drawings of a step, and learning rates; a GPU takes more drawings, and larger steps.
SIZES = {"cpu": (32, 128), "cuda": (256, 1024)}
RATES = {"cpu": (2e-3, 1.5e-3), "cuda": (2e-3, 2e-3)}
LESSONS = {"cpu": 32_768, "cuda": 131_072}
WARM_UP = 0.03
DECAY_FROM = 0.4
KL_WEIGHT = 1e-4
# Share of the lessons without words, which guidance is away from.
WORDLESS = 0.1
# What the painter's folder says of its images.
STEPS = 20
GUIDANCE = 3.0


@dataclass(frozen=True)
class Options:
    minutes: float
    device: str
    seed: int
    output: Path
    threads: int


class Training:
    """Both stages of one run."""

    def __init__(self, options: Options, console: Console) -> None:
        self._device = torch.device(options.device)
        kind = self._device.type
        self.tokenizer = models.new_tokenizer()
        drawn: Lessons = lessons(LESSONS[kind], options.seed, self.tokenizer, options.threads)
        torch.manual_seed(options.seed)
        torch.backends.cudnn.benchmark = True
        self.vae = self._placed(models.new_vae())
        self.denoiser = self._placed(models.new_denoiser())
        self.text_encoder = self._placed(models.new_text_encoder(self.tokenizer))
        self._plans = drawn.plans.to(self._device)
        self._tokens = drawn.tokens.to(self._device)
        self._wordless = self._tokens_of("")
        self._alphas = models.new_schedule().alphas_cumprod.to(self._device)
        self._latents = torch.empty(0)
        self._options = options
        self._console = console
        self._interruption = Interruption()
        self._sizes, self._rates = SIZES[kind], RATES[kind]

    def run(self) -> None:
        seconds = self._options.minutes * 60
        begun = time.monotonic()
        with self._interruption:
            self._stage("see", seconds * VAE_SHARE, self._rates[0], [self.vae], self._rebuild)
            self._latents = self._encoded()
            left = max(1.0, seconds - (time.monotonic() - begun))
            self._stage("paint", left, self._rates[1], [self.denoiser, self.text_encoder], self._denoise)

    @property
    def was_stopped(self) -> bool:
        return self._interruption.was_asked_for

    def save(self, folder: Path) -> None:
        for module in (self.vae, self.denoiser, self.text_encoder):
            module.to("cpu", memory_format=torch.contiguous_format).eval()
        models.save(folder, self.tokenizer, self.text_encoder, self.denoiser, self.vae)
        defaults = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE}
        (folder / "generation_config.json").write_text(json.dumps(defaults, indent=2) + "\n")

    def _placed(self, module: Any) -> Any:
        return module.train().to(self._device, memory_format=torch.channels_last)

    def _tokens_of(self, text: str) -> Tensor:
        found = self.tokenizer([text], padding="max_length", return_tensors="pt").input_ids
        return torch.as_tensor(found, device=self._device)

    def _stage(self, what: str, seconds: float, full: float, learning: list[Any], step: Callable[[], Tensor]) -> None:
        parameters = [p for module in learning for p in module.parameters()]
        adam = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.01, fused=self._device.type == "cuda")
        rates: dict[torch.optim.Optimizer, float] = {adam: full}
        note = ""
        with progress_bar(self._console) as bar:
            task = bar.add_task(what, total=1.0, note="")
            for number, done in self._until_over(seconds):
                with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
                    loss = step()
                loss.backward()
                move(parameters, rates, rate(done, WARM_UP, DECAY_FROM))
                if number % 50 == 0:
                    note = f"step {number}, loss {loss.item():.4f}"
                    if number % 500 == 0:
                        self._console.log(f"{what}: {note}")
                bar.update(task, completed=done, note=note)
        self._console.log(f"{what}: {note}, the last")

    def _until_over(self, seconds: float) -> Iterator[tuple[int, float]]:
        """Count the steps of a stage, and say what part of its time is over."""
        begun = time.monotonic()
        for number in itertools.count():
            done = (time.monotonic() - begun) / seconds
            if done >= 1 or self.was_stopped:
                return
            yield number, done

    def _chosen(self, size: int) -> Tensor:
        return torch.randint(len(self._plans), (size,), device=self._device)

    def _drawings(self, chosen: Tensor) -> Tensor:
        return draw(self._plans[chosen]).contiguous(memory_format=torch.channels_last)

    def _rebuild(self) -> Tensor:
        """How far drawings are from what the VAE makes of their latents. Edges count twice."""
        drawings = self._drawings(self._chosen(self._sizes[0]))
        found = self.vae.encode(drawings).latent_dist
        rebuilt = self.vae.decode(found.sample()).sample.float()
        kl = 0.5 * (found.mean**2 + found.var - 1 - found.logvar).float().mean()
        across, down = (functional.l1_loss(rebuilt.diff(dim=dim), drawings.diff(dim=dim)) for dim in (3, 2))
        loss: Tensor = functional.l1_loss(rebuilt, drawings) + across + down + KL_WEIGHT * kl
        return loss

    @torch.no_grad()
    def _encoded(self) -> Tensor:
        """Return the latents of all lessons, in float16, and set the VAE's scale, which makes their deviation 1."""
        self.vae.eval()
        found = []
        for some in torch.arange(len(self._plans), device=self._device).split(2 * self._sizes[0]):
            found.append(self.vae.encode(self._drawings(some)).latent_dist.mean)
            if self.was_stopped:
                break
        latents = torch.cat(found)
        scale = 1 / latents.std().item()
        self.vae.register_to_config(scaling_factor=scale)
        self._console.log(f"latents: {tuple(latents.shape)}, mean {latents.mean():.3f}, scale {scale:.3f}")
        return (latents * scale).half()

    def _denoise(self) -> Tensor:
        """How far the denoiser's velocity of noisy latents is from the true one."""
        chosen = torch.randint(len(self._latents), (self._sizes[1],), device=self._device)
        latents = self._latents[chosen].float()
        tokens = self._tokens[chosen]
        wordless = torch.rand(len(chosen), 1, device=self._device) < WORDLESS
        texts = self.text_encoder(torch.where(wordless, self._wordless, tokens)).last_hidden_state
        timesteps = torch.randint(len(self._alphas), (len(chosen),), device=self._device)
        alpha = self._alphas[timesteps][:, None, None, None]
        noise = torch.randn_like(latents)
        noisy = alpha.sqrt() * latents + (1 - alpha).sqrt() * noise
        velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * latents
        noisy = noisy.contiguous(memory_format=torch.channels_last)
        found = self.denoiser(noisy, timesteps, texts).sample
        return functional.mse_loss(found.float(), velocity)


def parsed_options() -> Options:
    parser = argparse.ArgumentParser(prog="python -m demo_model.painter.train", description="Train a small painter.")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="wall time for training")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=7, help="seed of the lessons and of the first weights")
    parser.add_argument("--output", type=Path, required=True, help="folder for the pipeline")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads, and processes that draw the lessons")
    return Options(**vars(parser.parse_args()))


def train(options: Options, console: Console) -> None:
    """Train and save the painter."""
    torch.set_num_threads(options.threads)
    training = Training(options, console)
    training.run()
    training.save(options.output)
    console.log(f"saved in {options.output}{', interrupted' if training.was_stopped else ''}")


if __name__ == "__main__":
    train(parsed_options(), Console())
