"""The requests of a run, by the name of a dataset.

`random`: token ids, or words where the server takes texts, of which no two requests share a beginning. `prefix`: the
same after one of a few long beginnings. A file: conversations as ShareGPT has them (a JSON list), or a JSON object with
`prompt` on each line. Knows no HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deploy.bench.workload import PlannedRequest, Workload, plan

# Characters of a token, where the length of an answer in a file is to be planned: an estimate for English.
CHARACTERS_OF_A_TOKEN = 4
MOST_OUTPUT_TOKENS = 2048
# Short words, of which tokenizers of large vocabularies make a token each, or nearly so.
_WORDS = re.findall(
    r"\w+",
    """
    able above after again air all along also always among animal answer any are ask back base because been
    before began best better big black blue book both bring build but call came can car care carry city clear
    close cold come could country cover cut dark day did does dog done door down draw drive each early earth
    east easy eat end even every face fact fall family far farm fast father feel feet few field find fire first
    fish five fly follow food form four free friend from full game gave girl give gold good got great green
    ground group grow had half hand hard have head hear heat help here high hold home horse hour house idea inch
    keep kind king knew know land large last late learn leave left less let letter life light like line list
    little live long look love low made make many map mark may mean men might mile mind money moon more most
    mother move much music must name near need never new next night north note noun now number off often old
    once one only open order other our out over own
    """,
)


class DatasetError(ValueError):
    """A dataset that cannot be read; the text names the file, the place and the remedy."""


@dataclass(frozen=True)
class Dataset:
    """The workload's numbers, for random prompts; `file` has the prompts instead, unless it is None.

    `texts`: prompts are texts, because the server is asked for chat or takes no token ids. `output_tokens_of_file`: a
    file's own lengths of answers count.
    """

    workload: Workload
    texts: bool = False
    file: Path | None = None
    output_tokens_of_file: bool = False

    def requests(self, count: int, seed: int) -> list[PlannedRequest]:
        """So many requests. The same seed gives the same ones. Raises DatasetError."""
        if self.file is not None:
            return self._from_file(read(self.file), count, seed)
        planned = plan(replace(self.workload, requests=count, seed=seed))
        return [replace(each, text=words(each.prompt)) for each in planned] if self.texts else planned

    def _from_file(self, lines: Sequence[tuple[str, int]], count: int, seed: int) -> list[PlannedRequest]:
        order = np.random.default_rng(seed).permutation(len(lines))
        chosen = [lines[order[i % len(lines)]] for i in range(count)]
        fixed = None if self.output_tokens_of_file else self.workload.output_tokens
        return [PlannedRequest([], fixed or tokens, text) for text, tokens in chosen]


def words(tokens: Sequence[int]) -> str:
    """A text with a word for each id."""
    return " ".join(_WORDS[token % len(_WORDS)] for token in tokens)


def read(file: Path) -> list[tuple[str, int]]:
    """The prompts of a file with the planned lengths of their answers in tokens. Raises DatasetError."""
    try:
        text = file.read_text(encoding="utf-8")
        records = json.loads(text) if text.lstrip().startswith("[") else list(map(json.loads, text.splitlines()))
    except (OSError, ValueError) as error:
        raise DatasetError(f"the dataset {file} cannot be read: {error}") from None
    found = [_entry(record) for record in records if isinstance(record, dict)]
    known = [entry for entry in found if entry is not None]
    if not known:
        raise DatasetError(
            f"the dataset {file} has no prompts: it must be a JSON list of conversations as ShareGPT has them, or have "
            f'{{"prompt": TEXT}} on each line'
        )
    return known


def _entry(record: dict[str, Any]) -> tuple[str, int] | None:
    """A prompt and the length of its answer; None for a record without them."""
    if isinstance(prompt := record.get("prompt"), str) and prompt:
        tokens = record.get("output_tokens")
        return prompt, tokens if isinstance(tokens, int) and tokens > 0 else _tokens(str(record.get("answer", "")))
    turns = record.get("conversations")
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns[:2]):
        return None
    asked, answered = (str(turn.get("value", "")) for turn in turns[:2])
    return (asked, _tokens(answered)) if asked else None


def _tokens(text: str) -> int:
    return max(1, min(MOST_OUTPUT_TOKENS, len(text) // CHARACTERS_OF_A_TOKEN))
