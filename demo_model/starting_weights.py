"""The weights that training starts from: a model that can already copy.

Most skills of the embedded model copy from the prompt: names, values, arguments. The circuit for that (a head that
looks one token back, then a head that looks for what followed the present token before) appears late in training and
all at once: after 1.6 million tokens there was no trace of it. Building it into the first weights saves that wait.
A word is one token after a space, another one after a quote, and a third with a capital: their embeddings start close
to each other, or a name that is read in a sentence could not be copied into JSON before each pair had been learned by
heart. Everything stays free to be learned.

Knows the layout of a Llama model's tensors. Does not know the corpus.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaForCausalLM

# A channel that is the same for every token lets a head attend by position alone.
_CONSTANT = 0.5
_POSITION_GAIN = 6.0
_MATCH_GAIN = 2.0
_PREVIOUS_SIZE = 1.0
_COPY_SIZE = 1.5
_LAST_NORM = 0.3
_SHARP_PAIRS = 8
_FORM_SIZE = 0.5
_OWN_SIZE = 0.1


def set_starting_weights(model: LlamaForCausalLM, texts: Sequence[str]) -> None:
    """Layers add nothing at first, but for the two copying steps in the first two layers; `texts` are the tokens'."""
    size = model.config.hidden_size
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
            elif weight.ndim == 2:
                weight.normal_(std=size**-0.5)
        model.model.norm.weight.fill_(_LAST_NORM)
        _Circuit(model).build(texts)


class _Circuit:
    """Residual channels: 0 is constant, then a head's width for the previous token, then the token itself."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model: Any = model
        config: Any = model.config
        self.width: int = config.head_dim
        self.size: int = config.hidden_size
        self.groups: int = config.num_key_value_heads
        self.heads_per_group: int = config.num_attention_heads // self.groups
        self.token = slice(1 + self.width, self.size)
        pairs = self.width // 2
        theta: float = config.rope_parameters["rope_theta"]
        self.angles = torch.tensor([theta ** (-pair / pairs) for pair in range(pairs)])

    def build(self, texts: Sequence[str]) -> None:
        embeddings = self.model.model.embed_tokens.weight
        tokens = self.size - self.token.start
        seen = self._orthonormal(self.width, tokens)
        embeddings.zero_()
        embeddings[: len(texts), self.token] = self._words(texts, seen)
        embeddings[:, 0] = _CONSTANT
        self._look_one_back(seen)
        self._find_what_followed(seen)

    def _words(self, texts: Sequence[str], seen: torch.Tensor) -> torch.Tensor:
        """A vector of length one for each word, and in directions that a search for it does not see, its form."""
        tokens = seen.shape[1]
        words = {word: i for i, word in enumerate(dict.fromkeys(text.strip().lower() or text for text in texts))}
        vectors = torch.randn(len(words), tokens) / math.sqrt(tokens)
        hidden = torch.randn(2, tokens)
        hidden -= hidden @ seen.T @ seen
        spaced, capital = _FORM_SIZE * hidden / hidden.norm(dim=1, keepdim=True)
        embeddings = vectors[[words[text.strip().lower() or text] for text in texts]]
        embeddings += torch.tensor([text.startswith(" ") for text in texts])[:, None] * spaced
        embeddings += torch.tensor([text != text.lower() for text in texts])[:, None] * capital
        embeddings += torch.randn(len(texts), tokens) * (_OWN_SIZE / math.sqrt(tokens))
        return embeddings

    def _orthonormal(self, rows: int, columns: int) -> torch.Tensor:
        basis: torch.Tensor = torch.linalg.qr(torch.randn(columns, rows)).Q
        return basis.T.contiguous()

    def _normed(self, *parts: float) -> float:
        """What RMS norm multiplies by, when the residual is made of parts of these lengths."""
        return math.sqrt(self.size) / math.sqrt(sum(part * part for part in parts))

    def _look_one_back(self, seen: torch.Tensor) -> None:
        """Layer 0, first head: score by distance, highest one back; writes the token there into its own channels."""
        attention = self.model.model.layers[0].self_attn
        scale, half = self._normed(1.0, _CONSTANT), self.width // 2
        gain = _POSITION_GAIN / (scale * _CONSTANT)
        query, key = torch.zeros(self.width), torch.zeros(self.width)
        sharp = self.angles[:_SHARP_PAIRS]
        key[:_SHARP_PAIRS] = gain
        query[:_SHARP_PAIRS] = gain * torch.cos(-sharp)
        query[half : half + _SHARP_PAIRS] = gain * torch.sin(-sharp)
        attention.q_proj.weight[: self.width] = 0
        attention.k_proj.weight[: self.width] = 0
        attention.q_proj.weight[: self.width, 0] = query
        attention.k_proj.weight[: self.width, 0] = key
        attention.v_proj.weight[: self.width] = 0
        attention.v_proj.weight[: self.width, self.token] = seen
        length = scale * math.sqrt(self.width / seen.shape[1])
        attention.o_proj.weight[1 : 1 + self.width, : self.width] = torch.eye(self.width) * (_PREVIOUS_SIZE / length)

    def _find_what_followed(self, seen: torch.Tensor) -> None:
        """Layer 1, one head per group: a token looks for places whose previous token was the same, and copies them.

        Only the slowly turning pairs of the rotary embedding are used, so that distance does not blur the match.
        """
        attention = self.model.model.layers[1].self_attn
        half, quarter = self.width // 2, self.width // 4
        slow = [*range(quarter, half), *range(half + quarter, self.width)]
        scale, share = self._normed(1.0, _CONSTANT, _PREVIOUS_SIZE), len(slow)
        tokens = seen.shape[1]
        copied = self._orthonormal(self.groups * self.width, tokens)
        for group in range(self.groups):
            chosen = slice(group * share % self.width, group * share % self.width + share)
            keys = slice(group * self.width, (group + 1) * self.width)
            head = group * self.heads_per_group
            queries = slice(head * self.width, (head + 1) * self.width)
            attention.q_proj.weight[queries] = 0
            attention.k_proj.weight[keys] = 0
            unit = _MATCH_GAIN * math.sqrt(tokens) / scale
            key_unit = unit * math.sqrt(self.width / tokens)
            rows = torch.tensor(slow)
            attention.q_proj.weight[queries.start + rows, self.token] = seen[chosen] * unit
            previous = slice(1 + chosen.start, 1 + chosen.stop)
            places = keys.start + rows
            attention.k_proj.weight[places, previous] = torch.eye(share) * key_unit
            attention.v_proj.weight[keys] = 0
            attention.v_proj.weight[keys, self.token] = copied[keys]
            attention.o_proj.weight[self.token, queries] = copied[keys].T * (_COPY_SIZE / scale)
