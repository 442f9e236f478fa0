"""The rows that ask for logits processors of the operator: code that clients may name, never send.

All processors run in the operator's order, each once a step over its rows. One that fails fails only these. Knows the
forms of processors; does not know where they come from.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from interfaces import BatchProcessorInputs, LogitsProcessor, ProcessorInputs, TextContext
from model_worker.sampling.registry import Processor, ProcessorForm, read_all
from model_worker.sampling.slots import SlotParams, Slots, Slotted
from model_worker.sampling.stages import JoiningRow, Stage

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Request:
    """The view of a request that a processor of SGLang's form gets, under the names that SGLang has for them."""

    origin_input_ids: list[int]
    output_ids: list[int]


@dataclass(slots=True)
class ProcessedRow:
    """What a row's processors are given, by the processor's name. Only what their forms need is there."""

    # Parameters of the forms BATCH and LOGITS; the latter have `__req__`, too.
    parameters: dict[str, dict[str, Any]]
    # Processors that were made for this request.
    own: dict[str, LogitsProcessor]
    request: Request | None
    context: TextContext | None
    slotted: dict[str, Slotted] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [*self.parameters, *self.own, *self.slotted]


class ProcessedRows(Stage[ProcessedRow]):
    """The rows that ask for processors."""

    def __init__(self, max_rows: int, processors: Mapping[str, Processor]) -> None:
        super().__init__(max_rows)
        self._processors = processors
        self._failures: dict[int, str] = {}
        in_slots = (name for name, processor in processors.items() if processor.form is ProcessorForm.SLOTS)
        self._slots = {name: Slots(processors[name].call) for name in in_slots}

    def state_of(self, joining: JoiningRow) -> ProcessedRow | None:
        params = joining.params
        if not params.named_processors:
            return None
        given = read_all(self._processors, params.named_processors)
        made = {name: self._processors[name] for name in given}
        if params.greedy and not params.logprobs:
            made = {name: processor for name, processor in made.items() if not processor.keeps_largest}
        if not made:
            return None
        forms = {processor.form for processor in made.values()}
        request = None
        listed = {ProcessorForm.LOGITS, ProcessorForm.SLOTS}
        if forms & listed:
            request = Request(joining.prompt.tolist(), joining.emitted.tolist())
        row = ProcessedRow({}, {}, request, _context(joining) if forms - listed else None)
        for name, processor in made.items():
            if processor.form is ProcessorForm.REQUEST:
                row.own[name] = _made(name, processor, given[name])
            elif processor.form is ProcessorForm.LOGITS:
                row.parameters[name] = {**given[name], "__req__": request}
            elif processor.form is ProcessorForm.SLOTS:
                assert request is not None
                values = SlotParams.of(params, given[name])
                _check_slotted(name, processor, values)
                row.slotted[name] = Slotted(values, request.origin_input_ids, request.output_ids)
            else:
                row.parameters[name] = given[name]
        return row

    def drop(self, row: int) -> None:
        super().drop(row)
        self._failures.pop(row, None)

    def failure(self, row: int) -> str | None:
        """Explain why the row's logits are NaN, if a processor is to blame."""
        return self._failures.get(row)

    def change(
        self, logits: torch.Tensor, index: NDArray[np.intp], rows: list[int], positions: NDArray[np.int64]
    ) -> None:
        groups: dict[str, list[int]] = defaultdict(list)
        for i, row in enumerate(rows):
            if row in self._failures:
                logits[index[i]] = torch.nan
                continue
            for name in self._states[row].names:
                groups[name].append(i)
        for name, processor in self._processors.items():
            if name in groups:
                members = [rows[i] for i in groups[name]]
                self._run(name, processor, logits, index[groups[name]].tolist(), members)

    def follow(self, row: int, token: int) -> None:
        state = self._states[row]
        if state.request is not None:
            state.request.output_ids.append(token)
        if state.context is not None:
            state.context.receive_token(token)

    def _run(self, name: str, processor: Processor, logits: torch.Tensor, index: list[int], rows: list[int]) -> None:
        """Run one processor over its rows, whose logits have these indices. Where it fails they become NaN."""
        if processor.form is ProcessorForm.REQUEST:
            for i, row in zip(index, rows, strict=True):
                self._guard(name, logits, [i], [row], partial(self._run_own, name, logits[i : i + 1], row))
            return
        runs = {ProcessorForm.BATCH: self._run_batch, ProcessorForm.SLOTS: self._run_slots}
        run = runs.get(processor.form, self._run_logits)
        self._guard(name, logits, index, rows, partial(run, name, processor, logits, index, rows))

    def _guard(
        self, name: str, logits: torch.Tensor, index: list[int], rows: list[int], run: Callable[[], None]
    ) -> None:
        try:
            run()
        except Exception as error:  # whatever the operator's code raises
            log.exception("the logits processor %s failed", name)
            logits[index] = torch.nan
            for row in rows:
                self._failures.setdefault(row, _reason(name, error))

    def _run_own(self, name: str, logits: torch.Tensor, row: int) -> None:
        state = self._states[row]
        assert state.context is not None
        inputs = ProcessorInputs(logits, state.context)
        state.own[name](inputs)
        _check_in_place(inputs.logits, logits)

    def _run_batch(
        self, name: str, processor: Processor, logits: torch.Tensor, index: list[int], rows: list[int]
    ) -> None:
        states = [self._states[row] for row in rows]
        contexts = [state.context for state in states if state.context is not None]
        part = logits[index]
        inputs = BatchProcessorInputs(part, None, contexts, [state.parameters[name] for state in states])
        processor.call(inputs)
        _check_in_place(inputs.logits, part)
        logits[index] = part

    def _run_slots(
        self, name: str, processor: Processor, logits: torch.Tensor, index: list[int], rows: list[int]
    ) -> None:
        everyone = {
            row: state.slotted[name]
            for row, state in self._states.items()
            if name in state.slotted and row not in self._failures
        }
        try:
            logits[index] = self._slots[name].apply(logits[index], rows, everyone)
        except Exception as error:  # whatever the operator's code raises
            # What it has heard of the others is not known either, so none of them may go on without it.
            for row in everyone:
                self._failures.setdefault(row, _reason(name, error))
            raise

    def _run_logits(
        self, name: str, processor: Processor, logits: torch.Tensor, index: list[int], rows: list[int]
    ) -> None:
        part = logits[index]
        result = processor.call(part, [self._states[row].parameters[name] for row in rows])
        if not isinstance(result, torch.Tensor) or result.shape != part.shape:
            raise ValueError("a processor must return logits of the shape that it was given")
        logits[index] = result


def _reason(name: str, error: Exception) -> str:
    return f"the logits processor {name!r} failed: {type(error).__name__}"


def _check_slotted(name: str, processor: Processor, values: SlotParams) -> None:
    check = getattr(processor.call, "validate_params", None)
    try:
        if check is not None:
            check(values)
    except Exception as error:  # whatever the operator's code raises
        reason = str(error) if isinstance(error, ValueError) else type(error).__name__
        raise ValueError(f"the logits processor {name!r} refuses its parameters: {reason}") from error


def _check_in_place(logits: Any, given: torch.Tensor) -> None:
    if logits is not given:
        raise ValueError("a processor must change the logits in place: inputs.logits was replaced")


def _made(name: str, processor: Processor, parameters: dict[str, Any]) -> LogitsProcessor:
    try:
        made: LogitsProcessor = processor.call(parameters)
    except Exception as error:  # whatever the operator's code raises
        reason = str(error) if isinstance(error, ValueError) else type(error).__name__
        raise ValueError(f"the logits processor {name!r} refuses its parameters: {reason}") from error
    if not callable(made):
        raise ValueError(f"the logits processor {name!r} cannot be called: it has no __call__")
    return made


def _context(joining: JoiningRow) -> TextContext:
    """Return the request's tokens and values as a context. Its id is the worker's own, and it never ends."""
    params = replace(joining.params, stop_token_ids=list(joining.stop_token_ids))
    context = TextContext.from_prompt(joining.prompt, params, max_length=None)
    context.receive_tokens(joining.emitted.tolist())
    return context
