"""Trains a small painter: first its text encoder learns to read, then its denoiser to paint what is read.

    python -m demo_model.painter.train --output FOLDER [--minutes 60] [--device cuda] [--seed 7] [--start-from FOLDER]

The lessons are drawn by seed. The folder is written every few minutes, and when the run is interrupted (Ctrl-C,
SIGTERM); `--start-from` continues from one. Needs torch, transformers, diffusers and rich, and nothing of the server.
Does not know scenes and drawings.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from demo_model.painter import model as models
from demo_model.painter.drawing import draw
from demo_model.painter.lessons import FACTS, Lessons, lessons
from demo_model.run import Interruption, move, progress_bar, rate

MINUTES = 60.0
# Minutes of them in which the text encoder learns.
READING_MINUTES = 3.0
# Lessons of a step, and all lessons.
READING_SIZE = 128
SIZES = {"cpu": 64, "cuda": 256}
LESSONS = {"cpu": 24_576, "cuda": 131_072}
READING_RATE = 3e-3
MATRIX_RATE = 2e-3
OTHER_RATE = 1e-3
WARM_UP = 0.02
DECAY_FROM = 0.4
# Share of the lessons without words, which guidance is away from.
WORDLESS = 0.1
# Largest weight of a lesson with little noise.
MOST_WEIGHT = 5.0
# What the average of the weights keeps of itself in a step.
AVERAGE_DECAY = 0.998
SAVED_EVERY_S = 300.0
# What the painter's folder says of its images.
STEPS = 20
GUIDANCE = 2.0


@dataclass(frozen=True)
class Options:
    minutes: float
    device: str
    seed: int
    output: Path
    threads: int
    start_from: Path | None


class Training:
    """Both stages of one run."""

    def __init__(self, options: Options, console: Console) -> None:
        self._device = torch.device(options.device)
        kind = self._device.type
        self.tokenizer = models.new_tokenizer()
        drawn: Lessons = lessons(LESSONS[kind], options.seed, self.tokenizer, options.threads)
        torch.manual_seed(options.seed)
        self.denoiser = models.new_denoiser().train().to(self._device)
        self.text_encoder = models.new_text_encoder(self.tokenizer).train().to(self._device)
        if options.start_from is not None:
            self._start_from(options.start_from)
        average = get_ema_multi_avg_fn(AVERAGE_DECAY)
        self._average = AveragedModel(self.denoiser, device=self._device, multi_avg_fn=average)
        self._heads = torch.nn.Linear(models.TEXT_WIDTH, sum(FACTS)).to(self._device)
        self._lessons = Lessons(*(value.to(self._device) for value in vars(drawn).values()))
        self._drawings = self._drawn()
        self._alphas = models.new_schedule().alphas_cumprod.to(self._device)
        self._scale = models.new_vae().config.scaling_factor
        self._options = options
        self._console = console
        self._interruption = Interruption()
        self._size = SIZES[kind]

    def run(self) -> None:
        begun = time.monotonic()
        with self._interruption:
            if self._options.start_from is None:
                parameters = [*self.text_encoder.parameters(), *self._heads.parameters()]
                reading = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.01)
                seconds = min(READING_MINUTES, self._options.minutes / 4) * 60
                self._stage("read", seconds, parameters, {reading: READING_RATE}, self._read)
            self.text_encoder.eval().requires_grad_(False)
            seconds = max(1.0, self._options.minutes * 60 - (time.monotonic() - begun))
            self._stage("paint", seconds, list(self.denoiser.parameters()), self._painting(), self._paint)

    @property
    def was_stopped(self) -> bool:
        return self._interruption.was_asked_for

    def save(self, folder: Path) -> None:
        models.save(folder, self.tokenizer, self.text_encoder.to("cpu"), self._average.module.to("cpu").eval())
        defaults = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE}
        (folder / "generation_config.json").write_text(json.dumps(defaults, indent=2) + "\n")
        for module in (self.text_encoder, self._average):
            module.to(self._device)

    def _start_from(self, folder: Path) -> None:
        self.denoiser.load_state_dict(type(self.denoiser).from_pretrained(folder / "transformer").state_dict())
        self.text_encoder.load_state_dict(type(self.text_encoder).from_pretrained(folder / "text_encoder").state_dict())

    def _drawn(self) -> Tensor:
        """Draw all lessons, in bytes."""
        return torch.cat([((draw(some) + 1) * 127.5).round().byte() for some in self._lessons.plans.split(128)])

    def _painting(self) -> dict[torch.optim.Optimizer, float]:
        """Muon for the matrices of the blocks, AdamW for the others, each with its full rate."""
        blocks = self.denoiser.transformer_blocks.named_parameters()
        matrices = [value for name, value in blocks if value.ndim == 2 and "scale_shift_table" not in name]
        known = set(map(id, matrices))
        others = [value for value in self.denoiser.parameters() if id(value) not in known]
        muon = torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw", ns_steps=4)
        return {muon: MATRIX_RATE, torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0): OTHER_RATE}

    def _stage(
        self,
        what: str,
        seconds: float,
        parameters: list[Tensor],
        rates: dict[torch.optim.Optimizer, float],
        step: Callable[[], Tensor],
    ) -> None:
        note, losses, saved = "", [], time.monotonic()
        with progress_bar(self._console) as bar:
            task = bar.add_task(what, total=1.0, note="")
            for number, done in self._until_over(seconds):
                with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
                    loss = step()
                loss.backward()
                losses.append(loss.detach())
                move(parameters, rates, rate(done, WARM_UP, DECAY_FROM))
                if number % 100 == 99:
                    note = f"step {number + 1}, loss {torch.stack(losses).mean():.4f}"
                    losses.clear()
                    self._console.log(f"{what}: {note}")
                if time.monotonic() - saved > SAVED_EVERY_S:
                    self.save(self._options.output)
                    saved = time.monotonic()
                bar.update(task, completed=done, note=note)
        self._console.log(f"{what}: {number + 1} steps")

    def _until_over(self, seconds: float) -> Iterator[tuple[int, float]]:
        """Count the steps of a stage, and say what part of its time is over."""
        begun = time.monotonic()
        for number in itertools.count():
            done = (time.monotonic() - begun) / seconds
            if done >= 1 or self.was_stopped:
                return
            yield number, done

    def _read(self) -> Tensor:
        """How far what linear maps find at each token is from the facts of the scene."""
        chosen = torch.randint(len(self._lessons.plans), (READING_SIZE,), device=self._device)
        mask = self._lessons.mask[chosen]
        read = self.text_encoder(self._lessons.tokens[chosen], attention_mask=mask).last_hidden_state
        found = self._heads(read[mask.bool()]).split(FACTS, 1)
        facts = self._lessons.facts[chosen][:, None].expand(-1, mask.shape[1], -1)[mask.bool()]
        return torch.stack([functional.cross_entropy(each, facts[:, i]) for i, each in enumerate(found)]).mean()

    def _paint(self) -> Tensor:
        """How far the denoiser's picture of a noisy drawing is from the drawing."""
        self._average.update_parameters(self.denoiser)
        chosen = torch.randint(len(self._drawings), (self._size,), device=self._device)
        latents = (self._drawings[chosen] / 127.5 - 1) * self._scale
        timesteps = torch.randint(len(self._alphas), (len(chosen),), device=self._device)
        alpha = self._alphas[timesteps][:, None, None, None]
        noisy = alpha.sqrt() * latents + (1 - alpha).sqrt() * torch.randn_like(latents)
        texts, mask = self._texts(chosen)
        found = self.denoiser(
            noisy,
            encoder_hidden_states=texts,
            encoder_attention_mask=mask,
            timestep=timesteps,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ).sample
        weight = (alpha / (1 - alpha) + 1).clamp(max=MOST_WEIGHT)
        loss: Tensor = (weight * (found.float() - latents) ** 2).mean()
        return loss

    @torch.no_grad()
    def _texts(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is read of the lessons, but of some nothing but the end."""
        tokens, mask = self._lessons.tokens[chosen], self._lessons.mask[chosen]
        wordless = torch.rand(len(chosen), 1, device=self._device) < WORDLESS
        end = torch.tensor(self.tokenizer.eos_token_id, device=self._device)
        is_first = torch.arange(tokens.shape[1], device=self._device)[None] == 0
        tokens = torch.where(wordless & is_first, end, tokens)
        mask = torch.where(wordless, is_first.long(), mask)
        return self.text_encoder(tokens, attention_mask=mask).last_hidden_state, mask


def parsed_options() -> Options:
    parser = argparse.ArgumentParser(prog="python -m demo_model.painter.train", description="Train a small painter.")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="wall time for training")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--seed", type=int, default=7, help="seed of the lessons and of the first weights")
    parser.add_argument("--output", type=Path, required=True, help="folder for the pipeline")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads, and processes that draw the lessons")
    parser.add_argument("--start-from", type=Path, help="folder of a pipeline whose training goes on")
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
