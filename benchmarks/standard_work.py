"""The standard work, W1 to W6, E1 to E3 and Q1 to Q512: what is asked of a server, and what it is started for.

Knows shapes of load. It does not know servers, nor what the figures mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.encoder_words import AROUND, ENCODERS, VOCABULARY
from benchmarks.run import Intruder, Load
from deploy.bench.workload import Workload

REQUEST_TIMEOUT_S = 600.0
"""Far beyond any cell's limit: what a cell cuts off has not failed."""
# The model of work on a quantised GGUF file, which places.py finds.
GGUF = "gguf"
WORD_IDS = (300, 48_999)
"""Tokens of the standard models that show as words: byte tokens can be halves of a character, which show late."""


@dataclass(frozen=True)
class StandardWork:
    """A closed loop of equally long requests on one of the standard models, by its size.

    `requests` bounds a cell beside the time limit. With an intruder the streams are meant to outlast the cell. On an
    encoder each request is one text, whose vector is the answer.
    """

    name: str
    model: str
    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    shared_prefix: int = 0
    intruder: Intruder | None = None

    def workload(self, seed: int, prefix_seed: int = 0) -> Workload:
        return Workload(
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            spread=0.0,
            seed=seed,
            first_token_id=WORD_IDS[0],
            last_token_id=min(WORD_IDS[1], VOCABULARY - 1) if self.embeds else WORD_IDS[1],
            shared_prefix=self.shared_prefix,
            prefix_seed=prefix_seed,
        )

    def load(self, time_limit: float) -> Load:
        return Load(self.concurrency, time_limit, REQUEST_TIMEOUT_S)

    @property
    def embeds(self) -> bool:
        """Whether answers are vectors."""
        return self.model in ENCODERS

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        if self.embeds:
            return self.prompt_tokens + AROUND
        intruder = self.intruder.prompt_tokens + 1 if self.intruder else 0
        return max(self.shared_prefix + self.prompt_tokens + self.output_tokens, intruder)

    def shortened(self) -> StandardWork:
        """For a test of the harness: the same kind of work on the tiny model, small enough for a busy machine."""
        few = min(4, self.concurrency)
        tiny = "encoder-tiny" if self.embeds else "tiny"
        small = replace(self, model=tiny, concurrency=few, requests=few, shared_prefix=self.shared_prefix // 8)
        if self.intruder:
            return replace(small, intruder=Intruder(256, 0.5))
        # Enough requests for CPU seconds, which come in steps of 10 ms, to show.
        prompt, output = self.prompt_tokens // 4, max(1, self.output_tokens // 8)
        return replace(small, requests=16 * few, prompt_tokens=prompt, output_tokens=output)


@dataclass(frozen=True)
class Needs:
    """What a server is started for: so many sequences at once, the longest of so many tokens, on so many threads.

    `embeds`: answers are vectors.
    """

    sequences: int
    context: int
    threads: int
    embeds: bool = False

    @classmethod
    def of(cls, works: Iterable[StandardWork], threads: int) -> Needs:
        known = list(works)
        sequences = max(work.concurrency + bool(work.intruder) for work in known)
        longest = max(work.longest for work in known)
        # Some peers want whole blocks, and room for a token that is not asked for.
        return cls(sequences, -(-(longest + 1) // 256) * 256, threads, any(work.embeds for work in known))


# Texts of a cell, by the tokens of each.
_EMBEDDED = {"E1": (16, 8192), "E2": (128, 2048), "E3": (512, 512)}
# Requests in flight of each work with an encoder: a query alone, a busy server, and a crowd.
_IN_FLIGHT = (1, 32, 256)


def _on_encoder() -> list[StandardWork]:
    return [
        StandardWork(f"{name}/{concurrency}", "encoder-22m", concurrency, texts, tokens - AROUND, 1)
        for name, (tokens, texts) in _EMBEDDED.items()
        for concurrency in _IN_FLIGHT
    ]


STANDARD_WORK = {
    work.name: work
    for work in (
        StandardWork("W1", "135m", 1, 4, 128, 128),
        StandardWork("W2", "135m", 16, 32, 128, 128),
        StandardWork("W3", "135m", 32, 32, 512, 64),
        StandardWork("W4", "135m", 8, 32, 32, 32, shared_prefix=1024),
        StandardWork("W5", "tiny", 64, 512, 32, 64),
        StandardWork("W6", "135m", 8, 8, 128, 3900, intruder=Intruder(4096, 3.0)),
        *_on_encoder(),
        # One stream, sixteen, and the time to the first token of a long prompt.
        StandardWork("Q1", GGUF, 1, 4, 128, 128),
        StandardWork("Q16", GGUF, 16, 32, 128, 128),
        StandardWork("Q512", GGUF, 1, 16, 512, 4),
    )
}


def kind_of(name: str) -> str:
    """Return the name of a work without the number of its requests in flight, where it has one."""
    return name.partition("/")[0]


def chosen_work(names: str, short: bool = False) -> Sequence[StandardWork]:
    """`W1,W5` in the order of the list; E1 is E1/1, E1/32 and E1/256. Raises ValueError.

    Empty is all of it but the work on a GGUF file, which must be at hand.
    """
    kinds = list(dict.fromkeys(kind_of(name) for name in STANDARD_WORK))
    usual = list(dict.fromkeys(kind_of(name) for name, work in STANDARD_WORK.items() if work.model != GGUF))
    wanted = [name.strip().upper() for name in names.split(",") if name.strip()] or usual
    if unknown := sorted(set(wanted) - set(STANDARD_WORK) - set(kinds)):
        raise ValueError(f"work must be a list of {', '.join(kinds)}, got {', '.join(unknown)}")
    works = [work for name, work in STANDARD_WORK.items() if {name, kind_of(name)} & set(wanted)]
    return [work.shortened() for work in works] if short else works
