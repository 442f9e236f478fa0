"""Measures the embedded model: greedy answers to held-out prompts, judged skill by skill.

    python -m demo_model.evaluate [--folder FOLDER] [--prompts 100]

Knows how to draw held-out prompts and to ask the model through transformers. Does not know how the model was trained.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from demo_model.corpus import shown
from demo_model.decoder import text_model
from demo_model.exchange import Exchange
from demo_model.skills import (
    arithmetic,
    facts,
    json_answers,
    lists,
    memory,
    small_talk,
    stories,
    tool_use,
    unknown,
)
from deploy.embedded_model import EMBEDDED_MODEL_PATH

Draw = Callable[[random.Random], Exchange]

SEED = 2024
BATCH = 25
LONGEST_ANSWER = 400


def _remembered(rng: random.Random) -> Exchange:
    """The question comes up to two exchanges after the statement."""
    between = [
        message
        for _ in range(rng.randint(0, 2))
        for message in rng.choice((small_talk.draw, arithmetic.draw))(rng).messages
    ]
    return memory.recall(memory.draw_parts(rng), tuple(between))


# Row of the model card: how to draw it, and whether thinking is on.
SKILLS: dict[str, tuple[Draw, bool]] = {
    "small talk": (small_talk.draw, False),
    "system message gives a name": (small_talk.draw_named, False),
    "tokenyard facts": (facts.draw, False),
    "capitals": (facts.draw_capital, False),
    "long explanations": (facts.draw_long, False),
    "stories": (stories.draw, False),
    "arithmetic": (arithmetic.draw, False),
    "arithmetic, thinking": (arithmetic.draw, True),
    "lists and counting": (lists.draw, False),
    "words: repeat, reverse, first, last": (lists.draw_words, False),
    "JSON": (json_answers.draw, False),
    "tool calls": (tool_use.draw, False),
    "tool calls, thinking": (tool_use.draw, True),
    "answers from tool results": (tool_use.draw_result, False),
    "memory over turns": (_remembered, False),
    "says that it does not know": (unknown.draw, False),
}


@dataclass(frozen=True)
class Score:
    right: int
    asked: int
    failures: tuple[tuple[str, str], ...]

    @property
    def share(self) -> float:
        return self.right / self.asked


class Answerer:
    """The model behind its chat template, greedy."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: Any = text_model(folder, dtype)

    def prompt(self, exchange: Exchange, thinking: bool) -> str:
        system = [{"role": "system", "content": exchange.system}] if exchange.system else []
        messages = [*system, *shown(exchange.prompt, thinking)]
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                tools=list(exchange.tools) or None,
                enable_thinking=thinking,
                add_generation_prompt=True,
                tokenize=False,
            )
        )

    def answers(self, prompts: list[str]) -> list[str]:
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        with torch.inference_mode():
            tokens = self.model.generate(
                **inputs, max_new_tokens=LONGEST_ANSWER, do_sample=False, temperature=None, top_p=None
            )
        texts = self.tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :])
        return [text.split("<|im_end|>")[0].split("<|endoftext|>")[0] for text in texts]


def held_out(draw: Draw, count: int, rng: random.Random) -> Iterator[Exchange]:
    """Different held-out exchanges, as many as there are up to `count`."""
    seen: set[str] = set()
    for _ in range(count * 400):
        exchange = draw(rng)
        prompt = str(exchange.prompt)
        if exchange.held_out and prompt not in seen:
            seen.add(prompt)
            yield exchange
            if len(seen) == count:
                return


def judged(exchange: Exchange, answer: str, thinking: bool) -> bool:
    """With thinking on there must be one thought, and the answer follows it."""
    if not thinking:
        return exchange.check(answer)
    opened, marked, rest = answer.partition("</think>")
    return bool(marked) and opened.startswith("<think>\n") and exchange.check(rest)


def score(answerer: Answerer, draw: Draw, thinking: bool, count: int) -> Score:
    exchanges = list(held_out(draw, count, random.Random(SEED)))
    prompts = [answerer.prompt(exchange, thinking) for exchange in exchanges]
    answers: list[str] = []
    for start in range(0, len(prompts), BATCH):
        answers += answerer.answers(prompts[start : start + BATCH])
    wrong = [
        (prompt, answer)
        for exchange, prompt, answer in zip(exchanges, prompts, answers, strict=True)
        if not judged(exchange, answer, thinking)
    ]
    return Score(len(exchanges) - len(wrong), len(exchanges), tuple(wrong))


def evaluate(folder: Path, count: int = 100, console: Console | None = None) -> dict[str, Score]:
    answerer, scores = Answerer(folder), dict[str, Score]()
    for name, (draw, thinking) in SKILLS.items():
        scores[name] = score(answerer, draw, thinking, count)
        if console:
            console.log(f"{name}: {scores[name].right} of {scores[name].asked}")
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo_model.evaluate", description="Measure the embedded model.")
    parser.add_argument("--folder", type=Path, default=EMBEDDED_MODEL_PATH, help="folder of the model")
    parser.add_argument("--prompts", type=int, default=100, help="held-out prompts per skill")
    parser.add_argument("--failures", type=int, default=0, help="wrong answers to show per skill")
    arguments = parser.parse_args()
    console, table = Console(), Table("skill", "right", "asked", "share")
    for name, result in evaluate(arguments.folder, arguments.prompts).items():
        table.add_row(name, str(result.right), str(result.asked), f"{result.share:.1%}")
        for prompt, answer in result.failures[: arguments.failures]:
            console.print(f"[{name}] {prompt[-300:]!r} -> {answer!r}", markup=False)
    console.print(table)


if __name__ == "__main__":
    main()
