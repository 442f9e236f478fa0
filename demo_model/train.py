"""Trains the text model from nothing: corpus, tokenizer, weights, evaluation, model card.

    python -m demo_model.train [--minutes 40] [--seed 7] [--output FOLDER]

Knows the size of the model and the learning schedule, which follows the clock,
so the run ends in time on any machine. An interrupted
run (Ctrl-C, SIGTERM) is still saved and evaluated. Does not know the skills, nor the eyes (see `eyes`).
"""

import argparse
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo_model import attention
from demo_model.batches import IGNORED, Batch, Batches
from demo_model.corpus import NO_EXERCISES, Corpus
from demo_model.decoder import text_model
from demo_model.evaluate import evaluate
from demo_model.model_card import write_model_card
from demo_model.run import Interruption, move, progress_bar, rate
from demo_model.starting_weights import set_starting_weights
from demo_model.train_tokenizer import MAX_LENGTH, load_tokenizer, save_tokenizer, train_tokenizer
from deploy.embedded_model import EMBEDDED_MODEL_PATH

# Wall time of a run.
MINUTES = 42.0
STEP_TOKENS = 2048
BATCH_TOKENS = 2048
WARM_UP = 0.01
DECAY_FROM = 0.3
MATRIX_RATE = 2e-3
VECTOR_RATE = 1.5e-3
# Large, because the usual 1e-8 lets the tiny gradients of rare tokens push all their embeddings the same way, until
# they can no longer be told apart.
VECTOR_EPSILON = 1e-4
CONTINUED_SHARE = 0.6
SAVE_EVERY_SECONDS = 300.0
LONGEST_STEP_SECONDS = 10.0


@dataclass(frozen=True)
class Options:
    minutes: float
    seed: int
    output: Path
    threads: int
    start_from: Path | None


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    attention.register()
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(attention.NAME)
    set_starting_weights(model, [str(tokenizer.decode([token])) for token in range(len(tokenizer))])
    return model


def continued_model(folder: Path) -> LlamaForCausalLM:
    """The weights of an earlier run, in the precision that training needs."""
    attention.register()
    model: Any = text_model(folder)
    model.train()
    model.set_attn_implementation(attention.NAME)
    return cast(LlamaForCausalLM, model)


def optimizers(model: LlamaForCausalLM) -> dict[torch.optim.Optimizer, float]:
    """Muon for the matrices of the layers (it needs fewer tokens than AdamW), AdamW for embeddings and norms.

    Each has its full rate.
    """
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    taken = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in taken]
    muon = torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw", ns_steps=4)
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.98), eps=VECTOR_EPSILON, weight_decay=0.0)
    return {muon: MATRIX_RATE, adamw: VECTOR_RATE}


def backward(model: LlamaForCausalLM, batch: Batch, learned: int) -> float:
    """Adds the gradients of one batch; logits are made only where something is learned."""
    ids, targets = torch.from_numpy(batch.ids), torch.from_numpy(batch.targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        chosen = targets != IGNORED
        logits = model.lm_head(hidden[chosen])
    loss = functional.cross_entropy(logits.float(), targets[chosen], reduction="sum") / learned
    loss.backward()
    return float(loss.detach())


class Training:
    """One run bounded by the clock."""

    def __init__(self, options: Options, tokenizer: PreTrainedTokenizerFast, console: Console) -> None:
        torch.manual_seed(options.seed)
        self.model = continued_model(options.start_from) if options.start_from else new_model(tokenizer)
        self.tokens = 0
        self.steps = 0
        self._options = options
        self._tokenizer = tokenizer
        self._console = console
        self._rates = optimizers(self.model)
        # A second run moves less, meets documents that the first has not met, and needs no exercises.
        self._full = CONTINUED_SHARE if options.start_from else 1.0
        corpus = Corpus(options.seed + 1, drawn=NO_EXERCISES) if options.start_from else Corpus(options.seed)
        self._batches = Batches(corpus, tokenizer)
        self._interruption = Interruption()

    def run(self) -> None:
        """Steps until the time is used up. A pause of the process (a stop signal, a sleeping laptop) does not count."""
        limit, worked, saved = self._options.minutes * 60, 0.0, 0.0
        with self._interruption, progress_bar(self._console) as bar:
            task, last = bar.add_task("train", total=1.0, note=""), time.monotonic()
            for batches in self._until_stopped():
                if worked >= limit:
                    break
                loss = self._step(batches, self._full * rate(worked / limit, WARM_UP, DECAY_FROM))
                now = time.monotonic()
                worked, last = worked + min(now - last, LONGEST_STEP_SECONDS), now
                note = f"step {self.steps}, {self.tokens / 1e6:.2f} M tokens, {self.tokens / worked:.0f} tokens/s"
                bar.update(task, completed=worked / limit, note=f"{note}, loss {loss:.3f}")
                if self.steps % 100 == 0:
                    self._console.log(f"{note}, loss {loss:.3f}")
                if worked - saved > SAVE_EVERY_SECONDS:
                    saved = worked
                    save(self.model, self._tokenizer, self._options.output)

    @property
    def was_stopped(self) -> bool:
        return self._interruption.was_asked_for

    def _until_stopped(self) -> Iterator[list[Batch]]:
        for batches in self._batches.steps(STEP_TOKENS, BATCH_TOKENS):
            if self.was_stopped:
                return
            yield batches

    def _step(self, batches: list[Batch], share: float) -> float:
        learned = sum(batch.learned for batch in batches)
        loss = sum(backward(self.model, batch, learned) for batch in batches)
        move(list(self.model.parameters()), self._rates, share)
        self.steps += 1
        self.tokens += sum(int(batch.ids.size) for batch in batches)
        return loss


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    shipped: Any = copy.deepcopy(model)
    shipped.to(torch.bfloat16)
    shipped.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.6,
        top_p=0.95,
        eos_token_id=[tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|endoftext|>")],
        pad_token_id=tokenizer.pad_token_id,
    )
    shipped.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)


def parsed_options() -> Options:
    parser = argparse.ArgumentParser(prog="python -m demo_model.train", description="Train the text model.")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="wall time for training; evaluation adds about two minutes"
    )
    parser.add_argument("--seed", type=int, default=7, help="seed of the corpus and of the first weights")
    parser.add_argument(
        "--output", type=Path, default=EMBEDDED_MODEL_PATH, help="folder for weights, tokenizer and model card"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--start-from", type=Path, help="folder of an earlier run to go on from, with its tokenizer")
    return Options(**vars(parser.parse_args()))


def train(options: Options, console: Console) -> bool:
    """Train, save, measure and describe the text model. Return whether the run came to its end."""
    torch.set_num_threads(options.threads)
    with console.status("corpus and tokenizer"):
        tokenizer = load_tokenizer(options.start_from) if options.start_from else train_tokenizer(options.seed)
    training = Training(options, tokenizer, console)
    size = sum(p.numel() for p in training.model.parameters())
    console.log(f"tokenizer of {len(tokenizer)} tokens, model of {size / 1e6:.2f} M parameters")
    training.run()
    save(training.model, tokenizer, options.output)
    console.log(f"saved in {options.output}; evaluating on held-out prompts")
    scores = evaluate(options.output, console=console)
    run = f"{training.steps} steps, {training.tokens / 1e6:.1f} million tokens, {options.minutes:g} minutes"
    run += f", seed {options.seed}" + (", continuing an earlier run" if options.start_from else "")
    write_model_card(options.output, scores, run)
    return not training.was_stopped


def main() -> None:
    train(parsed_options(), Console())


if __name__ == "__main__":
    main()
