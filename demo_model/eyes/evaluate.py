"""Measures the eyes of the embedded model: greedy answers to questions about new pictures, judged kind by kind.

    python -m demo_model.eyes.evaluate [--folder FOLDER] [--questions 200] [--failures 3]

Asks through transformers' own processor and `generate`. Does not know how the eyes were trained.
"""

import argparse
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForImageTextToText, AutoProcessor

from demo_model.eyes.pictures import KINDS, Picture, draw
from demo_model.eyes.questions import ask
from deploy.embedded_model import EMBEDDED_MODEL_PATH

SEED = 2024
BATCH = 50
LONGEST_ANSWER = 24


@dataclass
class Score:
    """Right answers of those asked for, and what was wrong: question, expected and given answer."""

    right: int = 0
    asked: int = 0
    failures: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.right / self.asked


class Reader:
    """The model behind its processor, greedy."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self._processor: Any = AutoProcessor.from_pretrained(folder)
        self._processor.tokenizer.padding_side = "left"
        model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
        self._model = model.eval()

    def answers(self, pictures: list[Picture], questions: list[str]) -> list[str]:
        texts = [self._prompt(question) for question in questions]
        images = [[picture.image] for picture in pictures]
        inputs = self._processor(images=images, text=texts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            tokens = self._model.generate(
                **inputs, max_new_tokens=LONGEST_ANSWER, do_sample=False, temperature=None, top_p=None
            )
        answers = self._processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :])
        return [answer.split("<|im_end|>")[0] for answer in answers]

    def _prompt(self, question: str) -> str:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        return str(self._processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def evaluate(reader: Reader, count: int, seed: int = SEED) -> dict[str, Score]:
    """Ask a number of questions for each kind of picture."""
    scores = {kind: Score() for kind in KINDS}
    for kind, score in scores.items():
        rng = random.Random(f"{kind} {seed}")
        for start in range(0, count, BATCH):
            pictures = [draw(rng, kind) for _ in range(min(BATCH, count - start))]
            asked = [ask(picture, rng) for picture in pictures]
            answers = reader.answers(pictures, [question for question, _ in asked])
            for (question, expected), answer in zip(asked, answers, strict=True):
                score.asked += 1
                score.right += answer == expected
                if answer != expected:
                    score.failures.append((question, expected, answer))
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m demo_model.eyes.evaluate", description="Measure the eyes of the embedded model."
    )
    parser.add_argument("--folder", type=Path, default=EMBEDDED_MODEL_PATH, help="folder of the model")
    parser.add_argument("--questions", type=int, default=200, help="questions for each kind of picture")
    parser.add_argument("--failures", type=int, default=0, help="wrong answers to show for each kind")
    arguments = parser.parse_args()
    console = Console()
    table = Table("kind", "right", "asked", "share")
    for kind, score in evaluate(Reader(arguments.folder), arguments.questions).items():
        table.add_row(kind, str(score.right), str(score.asked), f"{score.share:.1%}")
        for question, expected, answer in score.failures[: arguments.failures]:
            console.print(f"[{kind}] {question} {expected!r} was wanted, and {answer!r} came", markup=False)
    console.print(table)


if __name__ == "__main__":
    main()
