"""Trains the eyes of the embedded model, whose decoder never changes.

    python -m demo_model.eyes.train [--conversations 10000] [--pictures 300000] [--seed 7] [--output FOLDER]

First come vectors that make the decoder answer questions about a picture, and no picture is needed for them: prompt
tuning, with vectors for the words that name what is in it. Then the tower and the projector learn to make these vectors
of pictures, without the decoder. An interrupted run (Ctrl-C, SIGTERM) is saved, and its checkpoint is kept to go on
from. Does not know pictures and questions.
"""

import argparse
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast

from demo_model import attention
from demo_model.decoder import text_model
from demo_model.eyes.conversations import IGNORED, Conversations
from demo_model.eyes.evaluate import Reader, evaluate
from demo_model.eyes.model import TOKENS, new_model, pixels, save
from demo_model.eyes.model_card import MODEL_CARD, write_pictures_section
from demo_model.eyes.pictures import Picture, draw
from demo_model.eyes.vectors import NOISE, Vectors
from demo_model.run import Interruption, move, progress_bar, rate
from demo_model.train_tokenizer import IMAGE_TOKEN, TOKENIZER_FILES, load_tokenizer
from deploy.embedded_model import EMBEDDED_MODEL_PATH

# Conversations and pictures of a run.
CONVERSATIONS = 10_000
PICTURES = 300_000
# Conversations and pictures of a step.
ASKED_AT_ONCE = 16
SEEN_AT_ONCE = 96
# Learning rates of the tuned vectors, of matrices and of all else.
TUNED_RATE = 2e-2
MATRIX_RATE = 1.5e-3
OTHER_RATE = 1e-3
WARM_UP = 0.03
DECAY_FROM = 0.4
# Share of these rates in a run that goes on from a checkpoint, and moves less.
CONTINUED_SHARE = 0.3
SAVE_EVERY_SECONDS = 60.0
CHECKPOINT = "checkpoint.pt"
# Questions for each kind of picture, when the eyes are measured.
QUESTIONS = 200
# How often each kind is drawn, in each stage. Words take longest to be told apart.
ASKED_SHARES = {"digit": 3, "word": 3, "shape": 3, "colour": 2, "chart": 4}
SEEN_SHARES = {"digit": 4, "word": 7, "shape": 3, "colour": 1, "chart": 3}


# Draws a number of pictures and returns their loss, and the share of what is right.
Step = Callable[[int], tuple[Tensor, float]]


@dataclass(frozen=True)
class Options:
    conversations: int
    pictures: int
    seed: int
    decoder: Path
    output: Path
    threads: int
    # For each kind of picture, when the eyes are measured.
    questions: int
    start_from: Path | None = None


def optimizers(model: LlavaForConditionalGeneration) -> dict[torch.optim.Optimizer, float]:
    """Muon for the matrices of the tower and the projector, AdamW for the rest of them, each with its full rate."""
    whole: Any = model
    eyes = [*whole.model.vision_tower.named_parameters(), *whole.model.multi_modal_projector.named_parameters()]
    is_matrix = {name: p.ndim == 2 and "embedding" not in name for name, p in eyes}
    matrices = [p for name, p in eyes if is_matrix[name]]
    others = [p for name, p in eyes if not is_matrix[name]]
    muon = torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw", ns_steps=4)
    return {muon: MATRIX_RATE, torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0): OTHER_RATE}


class Training:
    """Both stages of one run."""

    def __init__(self, options: Options, console: Console) -> None:
        torch.manual_seed(options.seed)
        self.tokenizer: PreTrainedTokenizerFast = load_tokenizer(options.decoder)
        self.model = new_model(text_model(options.decoder), self.tokenizer.get_vocab()[IMAGE_TOKEN])
        self._whole: Any = self.model
        self._decoder: Any = self._whole.model.language_model
        attention.register()
        self._decoder.set_attn_implementation(attention.NAME)
        for parameter in (*self._decoder.parameters(), *self._whole.lm_head.parameters()):
            parameter.requires_grad_(False)
        embeddings = cast(Tensor, self._whole.get_input_embeddings().weight)
        self._vectors = Vectors(self.tokenizer, embeddings, TOKENS)
        if options.start_from:
            states = torch.load(options.start_from)
            self.model.load_state_dict(states["model"])
            self._vectors.load_state_dict(states["vectors"])
        self._full = CONTINUED_SHARE if options.start_from else 1.0
        self._options = options
        self._console = console
        self._random = random.Random(options.seed)
        self._conversations = Conversations(self.tokenizer, self._random)
        self._interruption = Interruption()
        self._saved = time.monotonic()

    @property
    def parameters(self) -> int:
        """Number of parameters that learn."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def run(self) -> None:
        tuning: dict[torch.optim.Optimizer, float] = {
            torch.optim.Adam(self._vectors.parameters(), betas=(0.9, 0.98)): TUNED_RATE
        }
        with self._interruption:
            self._stage("say", self._options.conversations, ASKED_AT_ONCE, tuning, self._say)
            self._stage("see", self._options.pictures, SEEN_AT_ONCE, optimizers(self.model), self._see)
            self._checkpoint()

    @property
    def was_stopped(self) -> bool:
        return self._interruption.was_asked_for

    def _stage(self, what: str, total: int, size: int, rates: dict[torch.optim.Optimizer, float], step: Step) -> None:
        learning = [p for optimizer in rates for group in optimizer.param_groups for p in group["params"]]
        with progress_bar(self._console) as bar:
            task = bar.add_task(what, total=total, note="")
            for done in self._until_stopped(total, size):
                loss, right = step(size)
                loss.backward()
                move(learning, rates, self._full * rate(done / total, WARM_UP, DECAY_FROM))
                note = f"loss {loss.item():.3f}, {right:.1%} right"
                bar.update(task, completed=done + size, note=note)
                if done // size % 50 == 0:
                    self._console.log(f"{what} {done}: {note}")
                if time.monotonic() - self._saved > SAVE_EVERY_SECONDS:
                    self._checkpoint()

    def _say(self, size: int) -> tuple[Tensor, float]:
        """The loss of the answers' tokens, and the share of tokens that are right."""
        pictures = self._drawn(size, ASKED_SHARES)
        turns = self._conversations.about(pictures)
        vectors = self._vectors(pictures)
        vectors = vectors + NOISE * torch.randn_like(vectors)
        inputs = self._whole.get_input_embeddings()(turns.ids).masked_scatter(turns.is_image[..., None], vectors)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self._decoder(inputs_embeds=inputs, use_cache=False).last_hidden_state
        learned = turns.targets != IGNORED
        targets = turns.targets[learned]
        logits = self._whole.lm_head(hidden[learned].float())
        right = (logits.argmax(-1) == targets).float().mean().item()
        return functional.cross_entropy(logits, targets), right

    def _see(self, size: int) -> tuple[Tensor, float]:
        """The distance of the tower's features from the pictures' vectors, and the share of words that are right."""
        pictures = self._drawn(size, SEEN_SHARES)
        values = pixels([picture.image for picture in pictures])
        features = torch.stack(list(self._whole.get_image_features(values, return_dict=True).pooler_output))
        return self._vectors.loss(features, pictures)

    def _drawn(self, size: int, shares: dict[str, int]) -> list[Picture]:
        kinds = self._random.choices(tuple(shares), tuple(shares.values()), k=size)
        return [draw(self._random, kind) for kind in kinds]

    def _until_stopped(self, total: int, size: int) -> Iterator[int]:
        for done in range(0, total, size):
            if self.was_stopped:
                return
            yield done

    def _checkpoint(self) -> None:
        self._saved = time.monotonic()
        self._options.output.mkdir(parents=True, exist_ok=True)
        states = {"model": self.model.state_dict(), "vectors": self._vectors.state_dict()}
        torch.save(states, self._options.output / CHECKPOINT)


def parsed_options() -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m demo_model.eyes.train", description="Train the eyes of the embedded model."
    )
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS, help="conversations of the first stage")
    parser.add_argument("--pictures", type=int, default=PICTURES, help="pictures of the second stage")
    parser.add_argument("--seed", type=int, default=7, help="seed of the pictures and of the first weights")
    parser.add_argument("--decoder", type=Path, default=EMBEDDED_MODEL_PATH, help="folder of the text model")
    parser.add_argument("--output", type=Path, default=EMBEDDED_MODEL_PATH, help="folder for the model with eyes")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="questions of each kind that measure the eyes")
    parser.add_argument("--start-from", type=Path, help="checkpoint of an earlier run to go on from")
    return Options(**vars(parser.parse_args()))


def train(options: Options, console: Console) -> None:
    """Train, save, measure and describe the eyes."""
    torch.set_num_threads(options.threads)
    training = Training(options, console)
    console.log(f"{training.parameters / 1e6:.2f} M parameters learn")
    training.run()
    save(training.model, training.tokenizer, options.output)
    if not training.was_stopped:
        (options.output / CHECKPOINT).unlink()
    if options.output.resolve() != options.decoder.resolve():
        for name in (*TOKENIZER_FILES, MODEL_CARD):
            shutil.copy(options.decoder / name, options.output / name)
    console.log(f"saved in {options.output}; asking about new pictures")
    scores = evaluate(Reader(options.output), options.questions)
    most = "at most " if training.was_stopped else ""
    run = f"{most}{options.conversations} conversations, {most}{options.pictures} pictures, seed {options.seed}"
    run += ", continuing an earlier run" if options.start_from else ""
    run += ", interrupted" if training.was_stopped else ""
    write_pictures_section(options.output, scores, training.parameters, run)


def main() -> None:
    train(parsed_options(), Console())


if __name__ == "__main__":
    main()
