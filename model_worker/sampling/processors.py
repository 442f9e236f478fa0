"""Logits processors of the operator: code that clients may name, never send.

Each is a class that the settings allow by its import path, made once without arguments. It is called as SGLang's are:
`processor(logits [rows, vocab], parameters) -> logits`, with one dict for each row, which has the request's parameters
and `__req__`, whose `origin_input_ids` and `output_ids` are the tokens so far. Knows neither steps nor other values.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

log = logging.getLogger(__name__)

Processor = Callable[[torch.Tensor, list[dict[str, Any]]], torch.Tensor]


def load_processors(paths: Mapping[str, str]) -> dict[str, Processor]:
    """Load processors by name, from paths `module:Class`. ValueError names the one that cannot be made."""
    return {name: _made(path) for name, path in paths.items()}


def _made(path: str) -> Processor:
    module, _, name = path.partition(":")
    try:
        made: Processor = getattr(importlib.import_module(module), name)()
    except Exception as error:  # whatever the operator's code raises
        raise ValueError(f"the logits processor {path} cannot be loaded: {error}") from error
    if not callable(made):
        raise ValueError(f"the logits processor {path} cannot be called")
    return made


@dataclass(slots=True)
class Request:
    """The view of a request that a processor gets, under the names that SGLang has for them."""

    origin_input_ids: list[int]
    output_ids: list[int]


@dataclass(slots=True)
class _Row:
    name: str
    parameters: dict[str, Any]
    request: Request


class ProcessedRows:
    """The rows that asked for a processor."""

    def __init__(self, processors: Mapping[str, Processor]) -> None:
        self._processors = processors
        self._rows: dict[int, _Row] = {}
        self._failures: dict[int, str] = {}

    def join(self, row: int, name: str, parameters: str, prompt: Sequence[int], emitted: Sequence[int]) -> None:
        """Add a row. `parameters` is JSON text. ValueError for a name that is not allowed."""
        if name not in self._processors:
            raise ValueError(f"the logits processor {name!r} is not one of {sorted(self._processors)}")
        request = Request(list(prompt), list(emitted))
        values = json.loads(parameters) if parameters else {}
        if not isinstance(values, dict):
            raise ValueError("the parameters of a logits processor must be an object")
        self._rows[row] = _Row(name, {**values, "__req__": request}, request)

    def drop(self, row: int) -> None:
        self._rows.pop(row, None)
        self._failures.pop(row, None)

    def failure(self, row: int) -> str | None:
        """Explain why the row's logits are NaN, if a processor is to blame."""
        return self._failures.get(row)

    def apply(self, logits: torch.Tensor, rows: NDArray[np.int32]) -> None:
        """Run each processor once over all its rows. The rows of one that fails become NaN."""
        groups: dict[str, list[int]] = defaultdict(list)
        for i, row in enumerate(rows.tolist() if self._rows else ()):
            if row in self._rows:
                groups[self._rows[row].name].append(i)
        for name, index in groups.items():
            asked = [self._rows[int(rows[i])].parameters for i in index]
            try:
                logits[index] = self._result(name, logits[index], asked)
            except Exception as error:  # whatever the operator's code raises
                log.exception("the logits processor %s failed", name)
                logits[index] = torch.nan
                reason = f"the logits processor {name!r} failed: {type(error).__name__}"
                self._failures.update((int(rows[i]), reason) for i in index)

    def chosen(self, rows: NDArray[np.int32], tokens: NDArray[np.int64]) -> None:
        """Record the drawn tokens, which the processors see in the next step."""
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True) if self._rows else ():
            if row in self._rows:
                self._rows[row].request.output_ids.append(token)

    def _result(self, name: str, logits: torch.Tensor, parameters: list[dict[str, Any]]) -> torch.Tensor:
        result = self._processors[name](logits, parameters)
        if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
            raise ValueError("a processor must return logits of the shape that it was given")
        return result
