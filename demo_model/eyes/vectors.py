"""The vectors that a picture shall give the decoder in place of its image tokens.

The first tokens name the picture's kind, its subject and its colour, two for each; the rest are the same for all
pictures, and make the decoder answer by the first. Knows vectors only. Does not know who learns to make them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_model.eyes.pictures import COLOURS, DIGITS, KINDS, MOST_BARS, SHAPES, WORDS, Picture

# Kind, subject, colour.
SLOTS = 3
TOKENS_OF_SLOT = 2
# Sharpness of the choice between words by the cosine of their vectors.
SHARPNESS = 16.0
# Weight of the distance from the vectors beside that choice.
DISTANCE_WEIGHT = 2.0
# Deviation of the noise that the decoder must bear, about a sixth of a vector's own.
NOISE = 0.014


class Vectors(nn.Module):
    """The vectors of each word in each slot, and those that are always the same."""

    def __init__(self, tokenizer: Any, embeddings: Tensor, tokens: int) -> None:
        """Words begin as the decoder's own words; one of several tokens begins as their mean."""
        super().__init__()
        bars = [str(count) for count in range(2, MOST_BARS + 1)]
        words = dict.fromkeys((*KINDS, *COLOURS, *SHAPES, *WORDS, *DIGITS, *bars))
        self._number = {word: i for i, word in enumerate(words)}
        rows = [embeddings[_ids(tokenizer, word)].mean(0) for word in words]
        # The last one is no word.
        known = torch.stack([*rows, torch.stack(rows).mean(0)]).detach().float()
        self.words = nn.Parameter(known[None, :, None].repeat(SLOTS, 1, TOKENS_OF_SLOT, 1))
        others = torch.randint(len(embeddings), (tokens - SLOTS * TOKENS_OF_SLOT,))
        self.constant = nn.Parameter(embeddings[others].detach().float().clone())

    def forward(self, pictures: Sequence[Picture]) -> Tensor:
        """The vectors of pictures, f32 [n, tokens, width]."""
        words = self.words[torch.arange(SLOTS)[None], self._numbers(pictures)].flatten(1, 2)
        return torch.cat([words, self.constant.expand(len(pictures), -1, -1)], dim=1)

    def loss(self, features: Tensor, pictures: Sequence[Picture]) -> tuple[Tensor, float]:
        """How far features are from the vectors of pictures, and the share of slots whose word is the nearest."""
        wanted = self(pictures).detach()
        distance = functional.mse_loss(features, wanted) / wanted.square().mean()
        found = features[:, : SLOTS * TOKENS_OF_SLOT].unflatten(1, (SLOTS, TOKENS_OF_SLOT)).flatten(2)
        known = functional.normalize(self.words.detach().flatten(2), dim=-1)
        logits = SHARPNESS * torch.einsum("nsd,swd->nsw", functional.normalize(found, dim=-1), known)
        numbers = self._numbers(pictures)
        right = (logits.argmax(-1) == numbers).float().mean().item()
        choice = functional.cross_entropy(logits.flatten(0, 1), numbers.flatten())
        return choice + DISTANCE_WEIGHT * distance, right

    def _numbers(self, pictures: Sequence[Picture]) -> Tensor:
        named = [(picture.kind, picture.subject, picture.colour) for picture in pictures]
        nothing = len(self._number)
        return torch.tensor([[self._number[word] if word else nothing for word in words] for words in named])


def _ids(tokenizer: Any, word: str) -> list[int]:
    """The tokens of a word as it stands in an answer."""
    ids: list[int] = tokenizer.encode(word if word.isdigit() else f" {word}", add_special_tokens=False)
    return ids
