"""Conversations about a picture, as token ids, with the tokens that count towards the loss.

Knows the forms in which people send a picture. Does not know the model.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from demo_model.exchange import reword
from demo_model.eyes.model import TOKENS
from demo_model.eyes.pictures import Picture
from demo_model.eyes.questions import choices, described
from demo_model.train_tokenizer import IMAGE_TOKEN

IGNORED = -100
_SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
_OPENING = "<|im_start|>assistant\n"


@dataclass(frozen=True)
class Turns:
    """Right-padded rows: `targets` is `ids` shifted by one, or IGNORED where nothing is learned."""

    ids: Tensor
    is_image: Tensor
    targets: Tensor


class Conversations:
    """Makes conversations, with a seed."""

    def __init__(self, tokenizer: Any, rng: random.Random) -> None:
        self._tokenizer = tokenizer
        self._random = rng
        self._opening: list[int] = tokenizer.encode(_OPENING, add_special_tokens=False)
        self._image: int = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        self._end: int = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._pad: int = tokenizer.pad_token_id

    def about(self, pictures: Sequence[Picture]) -> Turns:
        """One conversation about each picture."""
        rows = [self._ids(self._messages(picture)) for picture in pictures]
        width = max(map(len, rows))
        ids = torch.full((len(rows), width), self._pad)
        targets = torch.full((len(rows), width), IGNORED)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row)
            for start, stop in self._answers(row):
                targets[i, start - 1 : stop - 1] = ids[i, start:stop]
        return Turns(ids, ids == self._image, targets)

    def _ids(self, messages: list[dict[str, Any]]) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        ids: list[int] = self._tokenizer.encode(text.replace(IMAGE_TOKEN, IMAGE_TOKEN * TOKENS))
        return ids

    def _messages(self, picture: Picture) -> list[dict[str, Any]]:
        """One or two questions. The first comes with the picture, before it or behind it, or is left out."""
        asked = choices(picture)
        self._random.shuffle(asked)
        form = self._random.choices(("behind", "before", "none"), (6, 3, 1))[0]
        messages: list[dict[str, Any]] = [_SYSTEM] if self._random.random() < 0.1 else []
        image = {"type": "image"}
        if form == "none":
            asked[0] = ((), described(picture))
        for turn, (wordings, answer) in enumerate(asked[: self._random.choice((1, 1, 2))]):
            text = {"type": "text", "text": reword(self._random.choice(wordings), self._random) if wordings else ""}
            parts = [image, text] if form == "behind" else [text, image] if form == "before" else [image]
            content: Any = parts if turn == 0 else text["text"]
            messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        return messages

    def _answers(self, ids: list[int]) -> list[tuple[int, int]]:
        """Start and stop of each answer, its end mark included."""
        width = len(self._opening)
        starts = [i + width for i in range(len(ids) - width) if ids[i : i + width] == self._opening]
        return [(start, ids.index(self._end, start) + 1) for start in starts]
