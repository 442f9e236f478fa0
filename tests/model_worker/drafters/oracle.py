"""A drafter that knows the answers, and is right about each of their tokens as often as it is meant to be."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from interfaces import Join
from model_worker.drafters.base import Proposal


class Oracle:
    """`texts` are prompts with their answers; each token is guessed right with probability `chance`."""

    name = "oracle"

    def __init__(self, texts: Sequence[Sequence[int]], chance: float, vocab_size: int, seed: int) -> None:
        self._texts = [list(text) for text in texts]
        self._chance = chance
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def joined(self, join: Join) -> None:
        pass

    def left(self, row: int, answer: NDArray[np.int32]) -> None:
        pass

    def rest(self) -> None:
        pass

    def propose(self, texts: Mapping[int, NDArray[np.int32]], most: Mapping[int, int]) -> dict[int, Proposal]:
        found = {row: self._guess(text.tolist(), most[row]) for row, text in texts.items()}
        return {
            row: Proposal(np.array(guess, np.int32), np.full(len(guess), 0.9)) for row, guess in found.items() if guess
        }

    def _guess(self, known: list[int], most: int) -> list[int]:
        length = len(known)
        following = next((text[length:] for text in self._texts if text[:length] == known), [])
        return [self._told(token) for token in following[:most]]

    def _told(self, token: int) -> int:
        if self._random.random() < self._chance:
            return token
        return (token + self._random.randrange(1, self._vocab_size)) % self._vocab_size
